"""Weights by what was loaded, and by samples of their files: which changes make another name, which do not."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import vllm.config
from torch.nn.parameter import UninitializedParameter

from engine_patches.footprint import WEIGHTS
from engine_patches.forward import loaded_weights, weight_files
from engine_patches.forward.loaded_weights import COLUMNS, ROWS, Weights
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


@pytest.mark.parametrize("unread", [Collected(), torch.nn.Parameter(torch.empty(3, device="meta"))])
def test_a_model_with_a_tensor_that_holds_no_values_has_no_name(unread, engine_log):
    model = layers()
    model.register_parameter("unread", unread)
    assert loaded_weights._try_name_of(model) == ""
    assert "the weights cannot be told from others" in engine_log.text


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


def loads_with(connector: str | None) -> Any:
    """A `VllmConfig` with a connector of that name."""
    transfer = None if connector is None else SimpleNamespace(kv_connector=connector)
    return SimpleNamespace(kv_transfer_config=transfer)


@pytest.mark.parametrize(
    ("config", "is_read"),
    [
        (None, True),  # nobody has said yet what it is for
        (loads_with(None), False),
        (loads_with("OffloadingConnector"), False),
        (loads_with("NixlConnector"), True),
        (loads_with("SeamarkConnector"), True),
    ],
)
def test_weights_are_read_before_kernels_reorder_them_if_states_come_from_elsewhere(monkeypatch, config, is_read):
    monkeypatch.setattr(vllm.config, "get_current_vllm_config_or_none", lambda: config)
    model, name = layers(), loaded_weights.name_of(layers())
    seen: list[Any] = []
    process = loaded_weights.read_what_was_loaded(lambda *given: seen.append((given, getattr(given[0], WEIGHTS, ""))))
    process(model, "config", "device")
    assert seen == [((model, "config", "device"), name if is_read else "")]


class Wrapping(torch.nn.Parameter):
    """As vLLM's shared parameters: it holds others, by their places."""

    def __new__(cls, **parts: Any) -> Any:
        created = super().__new__(cls, torch.zeros(1), requires_grad=False)
        created.partitions = parts
        return created


def named(tensors: dict[str, Any]) -> str:
    model = torch.nn.Module()
    for key, tensor in tensors.items():
        model.register_parameter(key, tensor)
    return loaded_weights.name_of(model)


def test_of_a_parameter_that_shares_others_each_is_read_with_its_place():
    a, b = (torch.nn.Parameter(torch.full((3,), value), requires_grad=False) for value in (1.0, 2.0))
    names = {named({"w": Wrapping(**parts)}) for parts in ({"q": a, "k": b}, {"q": b, "k": a}, {"q": a}, {"k": a})}
    assert len(names) == 4
    assert named({"w": Wrapping(q=a, k=b)}) == named({"w": Wrapping(q=a.clone(), k=b.clone())})


@pytest.mark.parametrize("rows", [0, 1, ROWS - 1, ROWS, ROWS + 1, 2 * ROWS])
@pytest.mark.parametrize("rest", [0, 1, COLUMNS - 1])
def test_sums_are_of_all_words_each_times_its_rows_number(rows, rest):
    words = torch.randint(-(1 << 31), 1 << 31, (rows * COLUMNS + rest,), dtype=torch.int32)
    numbers = loaded_weights._numbers(rows.bit_length())
    assert len(numbers) > rows and (numbers % 2 != 0).all()
    expected = torch.zeros(COLUMNS, dtype=torch.int64)
    for row in range(rows):
        expected += words[row * COLUMNS : (row + 1) * COLUMNS].long() * numbers[row]
    expected[:rest] += words[rows * COLUMNS :].long() * numbers[-1]
    assert loaded_weights.sums_of(words) == expected.numpy().tobytes()


def test_words_are_a_tensors_bytes_in_the_order_of_its_memory_filled_up_with_zeros():
    memory = torch.arange(1, 12, dtype=torch.uint8)
    for start, end in ((0, 8), (0, 7), (1, 9), (3, 4), (0, 0)):
        held = memory[start:end]
        expected = bytes(held.tolist()) + bytes(-len(held) % 4)
        assert loaded_weights._words(held).numpy().tobytes() == expected
    transposed = torch.arange(8, dtype=torch.uint8).view(2, 4).t()
    assert loaded_weights._words(transposed).numpy().tobytes() == bytes(range(8))


def test_of_a_file_that_does_not_say_where_its_tensors_are_samples_are_read_and_no_more(tmp_path):
    path, names = tmp_path / "model.bin", set()
    for byte in (b"\0", b"x"):
        path.write_bytes(bytes(2000) + byte + bytes(1 << 19))
        names.add(sampled(path))
    assert len(names) == 1 and "" not in names


@pytest.mark.parametrize(
    "content", [b"", b"\xff" * 8, (9).to_bytes(8, "little") + b"[1, 2, 3]", b"\x02" + bytes(7) + b"{}"]
)
def test_a_file_of_another_form_is_known_by_no_sample_and_one_without_tensors_is(tmp_path, content):
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    assert bool(sampled(path)) is content.endswith(b"{}")
    assert sampled(tmp_path / "empty") == ""
