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


def test_the_version_is_a_line_for_a_bug_report(capsys):
    assert cli.main(["--version"]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    assert re.fullmatch(
        r"seamark \d+\.\d+\.\d+ \(vllm-seamark\), Python 3\.\d+\.\d+\S*, (vllm\S* \d.+|no vLLM .+)", line
    )


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
