"""Weights by what was loaded, and by samples of their files: which changes make another name, which do not."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn.parameter import UninitializedParameter

from engine_patches.forward import loaded_weights, weight_files
from engine_patches.forward.loaded_weights import COLUMNS, ROWS, Weights
from engine_patches.scheduler.checkpoints import Checkpoints
from engine_patches.scheduler.grid import Grid
from engine_patches.scheduler.hooks import forget_weights_that_may_change
from tests.harness.changed_weights import CHANGES, change

TYPES = (torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int8, torch.bool)


class Collected(UninitializedParameter):
    """As a GGUF loader leaves a fused layer: its parts beside a parameter without values."""

    def __new__(cls, *parts: Any) -> Any:
        created = super().__new__(cls, requires_grad=False)
        created.data_container, created.shard_id = list(parts), ["q", "k"]
        return created


def layers() -> torch.nn.Module:
    """A tensor of each type with an odd size, a scalar, a transposed one, one that begins inside another's memory."""
    generator = torch.Generator().manual_seed(1)
    model = torch.nn.Module()
    for dtype in TYPES:
        values = torch.randn(37, 101, generator=generator).to(dtype)
        model.register_parameter(f"as {dtype}".replace(".", " "), torch.nn.Parameter(values, requires_grad=False))
    model.register_buffer("scalar", torch.tensor(0.5))
    model.register_buffer("transposed", torch.randn(30, 50, generator=generator).t())
    model.register_buffer("inside", torch.randn(99, generator=generator).bfloat16()[1:98])
    parts = [torch.randint(0, 256, (8, 18), dtype=torch.uint8, generator=generator) for _ in range(2)]
    model.register_parameter("collected", Collected(*parts))
    return model


def memory_of(model: torch.nn.Module) -> list[torch.Tensor]:
    """The bytes of each tensor, to be changed in place."""
    found = []
    for each in [*model.buffers(), *model.parameters()]:
        for tensor in getattr(each, "data_container", [each]):
            start = tensor.storage_offset() * tensor.itemsize
            storage = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
            found.append(storage[start : start + tensor.numel() * tensor.itemsize])
    return found


def test_any_bit_of_any_tensor_and_nothing_else_makes_another_name():
    names = [loaded_weights.name_of(layers())]
    for number, memory in enumerate(memory_of(layers())):
        for place in {0, len(memory) // 2, len(memory) - 1}:
            model = layers()
            memory_of(model)[number][place] ^= 1
            names.append(loaded_weights.name_of(model))
    assert names[0] == loaded_weights.name_of(layers())
    assert len(set(names)) == len(names) > 3 * len(TYPES)


@pytest.mark.parametrize("unread", [Collected(), torch.nn.Parameter(torch.empty(3, device="meta"))])
def test_a_model_with_a_tensor_that_holds_no_values_has_no_name(unread, engine_log):
    model = layers()
    model.register_parameter("unread", unread)
    assert loaded_weights._try_name_of(model) == ""
    assert "the weights cannot be told from others" in engine_log.text


def test_sums_of_a_device_see_what_changes_alone_and_what_changes_together():
    words = torch.randint(-(1 << 31), 1 << 31, ((ROWS + 2) * COLUMNS + 5,), dtype=torch.int32)
    changes = {"": words.clone()}
    for place in (0, COLUMNS, ROWS * COLUMNS + 7, len(words) - 1):
        for bit in (1, 1 << 31):
            changes[f"bit {bit} of word {place}"] = words.clone()
            changes[f"bit {bit} of word {place}"][place] ^= bit - (1 << 32 if bit >> 31 else 0)
    changes["signs of one column"] = words.clone()
    changes["signs of one column"][::COLUMNS] ^= -(1 << 31)
    changes["all signs"] = words ^ -(1 << 31)
    changes["two rows change places"] = words.clone()
    changes["two rows change places"][: 2 * COLUMNS] = words[: 2 * COLUMNS].roll(COLUMNS)
    changes["one word moves on"] = words.roll(1)
    changes["one word less"] = words[:-1]
    sums = [loaded_weights.sums_of(changed) for changed in changes.values()]
    assert len(set(sums)) == len(sums) and sums[0] == loaded_weights.sums_of(words)


def together(*names: list[str], **parallel: Any) -> Weights:
    sizes = {"data_parallel_size": 1, "tensor_parallel_size": 1, "pipeline_parallel_size": 1}
    config = SimpleNamespace(
        parallel_config=SimpleNamespace(**sizes | {"enable_expert_parallel": False} | parallel),
        model_config=SimpleNamespace(is_moe=True),
        kv_transfer_config=None,
    )
    return loaded_weights._together(names, config)


def test_an_engines_weights_are_those_of_all_its_ranks_in_their_order():
    a, b, c, drafting = ["a", ""], ["b", ""], ["c", ""], ["a", "b"]
    names = {together(*ranks).name for ranks in ([a, b], [b, a], [a], [a, c], [drafting])}
    assert len(names) == 5 and "" not in names
    assert together(a).cut != together(a, tensor_parallel_size=2).cut


@pytest.mark.parametrize(
    "unknown", [together(), together(["a", "b"], ["", "b"]), together(["a", ""], data_parallel_size=2)]
)
def test_weights_of_which_a_part_is_not_known_have_no_name_and_say_why(unknown):
    assert unknown.name == unknown.cut == "" and unknown.unknown


@pytest.mark.parametrize("method", ["reload_weights", "update_weights", lambda worker: None])
def test_weights_that_may_be_changed_while_the_engine_runs_are_no_longer_known(method):
    closed: list[str] = []
    checkpoints = Checkpoints(Grid(16, 16), 384, weights=Weights("w", "", "cut", "sampled"))
    checkpoints.states = SimpleNamespace(store=SimpleNamespace(close=closed.append))
    core = SimpleNamespace(scheduler=SimpleNamespace(seamark=checkpoints))
    call = forget_weights_that_may_change(lambda *arguments, **more: (arguments, more))
    call(core, "compute_weight_checksums")
    assert checkpoints.weights.name == "w" and not closed
    assert call(core, method, args=(1,)) == ((core, method), {"args": (1,)})
    assert not any(checkpoints.weights._replace(unknown="")) and closed == [checkpoints.weights.unknown]


def sampled(model: Path, **facts: Any) -> str:
    config = {"model": str(model), "dtype": torch.float32, "quantization": None, "revision": None} | facts
    return weight_files.name_of(SimpleNamespace(**config), SimpleNamespace(download_dir=None))


def test_samples_see_a_change_of_any_tensor_of_a_file_whose_ends_are_as_before(model: Path, tmp_path: Path):
    found = [sampled(model), sampled(model, quantization="fp8")]
    for name, how in CHANGES.items():
        own = Path(shutil.copytree(model, tmp_path / name))
        assert sampled(own) == found[0]
        change(own, how)
        found.append(sampled(own))
    for name, content in (("one.gguf", bytes(5 << 20)), ("other.gguf", bytes(3 << 20) + b"x" * 4096 + bytes(2 << 20))):
        (tmp_path / name).write_bytes(content[: 5 << 20])
        found.append(sampled(tmp_path / name))
    assert len(set(found)) == len(found) and "" not in found


@pytest.mark.parametrize("model", ["s3://bucket/model", "nobody/has-it-here"])
def test_weights_that_are_no_files_here_are_known_by_no_sample(model: str):
    assert sampled(Path(model)) == ""
