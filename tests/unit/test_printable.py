"""Nothing that comes from outside moves a terminal's cursor or forges a line of a log."""

from __future__ import annotations

import ast
import logging
import logging.config
from io import StringIO
from pathlib import Path

import pytest

from proxy.commands.serve import LOGGING
from proxy.printable import printable, printable_lines

ROOT = Path(__file__).parents[2]

EVIL = "m\x1b[2J\x1b[1;1Hwill hit\n2026-11-25 23:00:00,000 INFO seamark.gateway forged\x9b31m\r\u202e\u2028\ud800<img>"


def is_clean(text: str) -> bool:
    return all(line.isprintable() for line in text.split("\n"))


def logged(*said: str, exc_info: Exception | None = None) -> str:
    stream = StringIO()
    handler = logging.StreamHandler(stream)
    formatter = logging.config.DictConfigurator(LOGGING).configure_formatter(LOGGING["formatters"]["plain"])
    handler.setFormatter(formatter)
    logger = logging.Logger("seamark.test")
    logger.addHandler(handler)
    logger.error(*said, exc_info=exc_info)
    return stream.getvalue()


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("openai/gpt-oss 120b é 漢 😀", "openai/gpt-oss 120b é 漢 😀"),
        ("a\nb\tc\r\x1b[2J\x9b31m\x07\x7f\x00", r"a\nb\tc\r\x1b[2J\x9b31m\x07\x7f\x00"),
        ("\u202eabc\u2028\ufeff\ud800", r"\u202eabc\u2028\ufeff\ud800"),
    ],
)
def test_what_a_terminal_would_obey_is_an_escape_and_all_else_stays(text, shown):
    assert printable(text) == shown == printable(shown)
    assert printable_lines(f"{text}\n\n") == (shown if "\n" not in text else shown.replace(r"\n", "\n", 1)) + "\n\n"


def test_a_record_of_a_log_is_one_line_whatever_is_in_it():
    for said in (("worker %s is up", EVIL), (EVIL.replace("%", ""),)):
        text = logged(*said)
        assert text.count("\n") == 1 and is_clean(text) and "will hit" in text


def test_a_traceback_keeps_its_lines_and_nothing_else():
    try:
        raise ValueError(EVIL)
    except ValueError as error:
        text = logged("failed: %s", EVIL, exc_info=error)
    assert is_clean(text) and "Traceback" in text and "failed: m\\x1b[2J" in text


@pytest.mark.parametrize("command", ["doctor", "setup", "boundary", "serve"])
def test_commands_that_ask_workers_print_nothing_past_that(command):
    """Of what they print, a part that is not written here goes through `printable` or `printable_lines`."""
    tree = ast.parse((ROOT / "proxy" / "commands" / f"{command}.py").read_text())
    printed = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and ast.unparse(node.func) == "print"]
    assert printed
    plain = {"', '.join(ways)", "bounds", "shlex.quote(given)", "server.url"}  # of our own words, and of arguments
    for call in printed:
        for argument in call.args:
            text = ast.unparse(argument)
            parts = [ast.unparse(node.value) for node in ast.walk(argument) if isinstance(node, ast.FormattedValue)]
            for part in parts or [text]:
                is_ours = part in plain or part.startswith(("'", "json.dumps(", "', '.join(server.models)"))
                assert "printable" in part or is_ours, text
