"""Whose weights compute a request: where it is not certain, nothing is found under its adapter's name."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from engine_patches.scheduler.adapters import CONFIG, WEIGHTS, Adapters


def asked(folder: Path, name: str, number: int = 1) -> SimpleNamespace:
    """vLLM's `LoRARequest` for an adapter of `folder`."""
    folder.mkdir(exist_ok=True)
    (folder / CONFIG).write_text("{}")
    (folder / WEIGHTS[0]).write_text(folder.name)
    return SimpleNamespace(lora_name=name, lora_path=str(folder), lora_int_id=number, load_inplace=False)


@pytest.mark.parametrize(("folder", "name"), [("one", "other"), ("other", "one")], ids=["name", "path"])
def test_of_two_adapters_under_one_id_the_first_alone_is_certain(tmp_path: Path, folder: str, name: str):
    """Several API servers count ids of their own, and the workers hold one adapter under each."""
    held, first, second = Adapters(), asked(tmp_path / "one", "one"), asked(tmp_path / folder, name)
    kept = held.of(first)
    assert kept is not None and kept.name == "one"
    assert held.of(second) is None
    assert held.of(SimpleNamespace(**vars(first))) is kept


def test_an_adapter_that_is_loaded_under_another_id_is_certain_beside_it(tmp_path: Path):
    held = Adapters()
    found = [held.of(asked(tmp_path / name, name, number)) for number, name in enumerate(("one", "other"))]
    assert [each and each.name for each in found] == ["one", "other"]
