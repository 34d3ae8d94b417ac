"""What `seamark` says if a library that a command needs is missing."""

from __future__ import annotations

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


def test_a_module_that_no_installation_brings_is_an_error_of_the_code(missing):
    missing("proxy.nowhere")
    with pytest.raises(ModuleNotFoundError, match=r"proxy\.nowhere"):
        cli.main(["serve"])
