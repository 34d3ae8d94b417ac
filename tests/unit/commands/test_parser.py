"""Flags of the gateway's commands: written out, or refused in one line."""

from __future__ import annotations

import ast
import importlib
from pathlib import Path

import pytest

from proxy.bench.menu import BENCHMARKS
from proxy.cli import COMMANDS
from proxy.commands.parser import Parser

ROOT = Path(__file__).parents[3]

# A flag that nobody has, and what abbreviations made of a flag that somebody has.
WRONG = {
    "serve": {"--workers": "--worker or --workers-dns", "--admin-prot=1": "--admin-port or --admin-host"},
    "doctor": {"--workers": "--worker", "--gatway": "--gateway"},
    "boundary": {"--work": "--worker", "--models": "--model"},
    "setup": {"--model-name": "--model", "--sorce": "--source or --force"},
    "key": {"--max-in": "--max-inflight"},
    **{f"bench {name}": {"--jsn": "--json"} for name in BENCHMARKS if name not in ("grid", "agents")},
    "bench demo": {"--keeps": "--keep"},
}


@pytest.mark.parametrize(("command", "flag"), [(command, flag) for command, flags in WRONG.items() for flag in flags])
def test_a_flag_that_does_not_exist_is_answered_in_one_line_with_those_that_read_like_it(command, flag, capsys):
    name, *rest = command.split()
    with pytest.raises(SystemExit) as ended:
        importlib.import_module(COMMANDS[name].module).main([*rest, flag, "http://127.0.0.1:8000"])
    (line,) = capsys.readouterr().err.splitlines()
    given = flag.partition("=")[0]
    assert line.startswith(f"seamark {command}: no flag {given}; did you mean {WRONG[command][flag]}?")
    assert ended.value.code == 2


def abbreviating(path: Path) -> list[str]:
    """Where a file makes a parser of argparse's own that takes abbreviations."""
    calls = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
    return [
        f"{path.relative_to(ROOT)}:{call.lineno}"
        for call in calls
        if ast.unparse(call.func).rpartition(".")[2] == "ArgumentParser"
        and "allow_abbrev=False" not in map(ast.unparse, call.keywords)
    ]


def test_no_command_takes_abbreviations():
    files = [*(ROOT / "proxy").rglob("*.py"), *(ROOT / "engine_patches").rglob("*.py")]
    assert not [place for path in files for place in abbreviating(path)]


def test_flags_behind_a_subcommand_are_its_own(capsys):
    made = Parser(prog="seamark some")
    made.add_subparsers().add_parser("mine").add_argument("--base-url")
    assert made.parse_args(["mine", "--base-url", "x"]).base_url == "x"
    with pytest.raises(SystemExit):
        made.parse_args(["mine", "--base", "x"])
    assert "seamark some mine: no flag --base; did you mean --base-url?" in capsys.readouterr().err
