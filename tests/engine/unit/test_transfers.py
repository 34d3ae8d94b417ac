"""Prefills of other workers: where they stop, which are loaded, what is told of them; whose weights computed them."""

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
from engine_patches.forward import loaded_weights
from engine_patches.forward.loaded_weights import COLUMNS, ROWS, Weights
from engine_patches.scheduler import transfers
from engine_patches.scheduler.planner import HINTED, CheckpointTarget, Grid
from tests.harness.changed_weights import CHANGES, change

UNIT = 16  # tokens


ENGINE = Weights("loaded", "", "whole", "sampled")


class Worker:
    """What transfers see of one engine."""

    def __init__(self, weights: Weights = ENGINE, targets: tuple[int, ...] = (), **more: Any) -> None:
        self.cached: set[int] = set()
        self.checkpoints = SimpleNamespace(
            grid=Grid(UNIT, UNIT),
            verified=more.get("verified", 1),
            weights=weights,
            state_of=lambda request: request.seamark,
            targets=lambda request: [CheckpointTarget(position, HINTED) for position in targets],
        )
        keys = SimpleNamespace(is_cached=lambda request, position: position in self.cached)
        states = SimpleNamespace(in_pass=more.get("in_pass", True), keys=keys)
        self.transfers = transfers.Transfers(self.checkpoints, states)
        self.refuses = self.transfers.look_at

    def offer(self, tokens: int = 100, number: int = 1, **more: Any) -> dict[str, Any]:
        """What a gateway brings of a prefill of so many tokens here, with other parameters where they are given."""
        address = dict(remote_block_ids=[[1]], remote_engine_id="p", remote_host="h", remote_port=1)
        names = self.transfers.names_of(asked(tokens))
        own = {"remote_request_id": f"cmpl-{number}", "remote_num_tokens": tokens, transfers.DEADLINE: 7.0}
        offer = {"do_remote_prefill": True, **address, **own, **names, **more}
        return {name: value for name, value in offer.items() if value != "missing"}


def asked(tokens: int = 150, salt: str = "", **more: Any) -> Any:
    """A vLLM `Request` of so many tokens, counted up."""
    ids = list(range(tokens))
    made = SimpleNamespace(
        request_id="r",
        prompt_token_ids=list(ids),
        prompt_embeds=None,
        _all_token_ids=list(ids),
        num_prompt_tokens=tokens,
        num_output_tokens=0,
        num_computed_tokens=0,
        block_hashes=[f"{salt}{end}".encode() for end in range(UNIT, tokens + 1, UNIT)],
        mm_features=[],
        lora_request=None,
        cache_salt=salt or None,
        kv_transfer_params=None,
        seamark=SimpleNamespace(prompt_tokens=0, loaded=0),
    )
    made.all_token_ids = made._all_token_ids
    vars(made).update(more)
    return made


@pytest.mark.parametrize("tokens", [1, 15, 100, 144, 149])
def test_what_an_equal_worker_computed_of_a_prompt_is_loaded_once(tokens):
    worker, request = Worker(), asked()
    assert worker.refuses(request, worker.offer(tokens)) == ""
    assert request.seamark.loaded == tokens
    assert worker.refuses(request, worker.offer(tokens)) == ""  # asked again: there was no room
    assert worker.refuses(asked(), worker.offer(tokens)) == transfers.TAKEN
    assert worker.refuses(asked(), worker.offer(tokens, number=2)) == ""


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        *(({f"remote_{name}": None}, transfers.NOT_WHOLE) for name in ("block_ids", "port")),
        ({transfers.CONTENT: "missing"}, "no Seamark"),
        ({transfers.DEADLINE: "missing"}, "no Seamark"),
        ({"remote_num_tokens": 150}, "another length"),
        ({transfers.CONTENT: "0" * 32}, "another prompt"),
        ({transfers.CUT: "in two", transfers.SAMPLED: ""}, "another number of ranks"),
        ({transfers.CUT: "in two", transfers.SAMPLED: "0" * 32}, "another prompt"),
    ],
    ids=str,
)
def test_what_is_doubtful_is_computed_and_each_cause_is_said_once(engine_log, changed, told):
    worker = Worker()
    causes = [worker.refuses(request := asked(), worker.offer(number=number, **changed)) for number in (1, 2)]
    assert causes[0] == causes[1] and told in causes[0] and request.seamark.loaded == 0
    assert len(engine_log.messages) == 1 and told in engine_log.messages[0]
    if told == transfers.NOT_WHOLE:
        assert worker.refuses(request, worker.offer(number=1)) == "", "it counts as taken by nobody"


@pytest.mark.parametrize(
    ("here", "there", "is_loaded"),
    [
        (ENGINE, ENGINE, True),
        (ENGINE, Weights("others", "", "whole", "sampled"), False),
        (ENGINE, Weights("loaded", "", "in two", "sampled"), True),  # cut otherwise: samples are compared
        (ENGINE, Weights("loaded", "", "in two", "others"), False),
        (Weights("", "?", "", "sampled"), Weights("", "?", "", "sampled"), True),
        (Weights("", "unknown to me", "", ""), ENGINE, False),
        (ENGINE, Weights("", "?", "", ""), False),
    ],
)
def test_only_what_the_same_weights_have_computed_is_loaded(here, there, is_loaded):
    refusal = Worker(here).refuses(asked(), Worker(there).offer())
    assert (refusal == "") is is_loaded
    assert not here.unknown or is_loaded or here.unknown in refusal


def test_a_name_stands_for_tokens_weights_and_what_else_a_hash_covers():
    contents = Worker().transfers.content_of
    requests = [asked(), asked(200), asked(salt="s")]
    assert contents(requests[0], 100, "w") == contents(requests[1], 100, "w")
    others = [contents(requests[0], tokens, "w") for tokens in (9, 96, 100, 101)]
    others += [contents(requests[0], 100, "x"), *(contents(requests[2], tokens, "w") for tokens in (9, 100))]
    other_words = asked()
    other_words.all_token_ids[97] = 7  # behind the last whole unit
    others.append(contents(other_words, 100, "w"))
    assert len(set(others)) == len(others) and all(len(each) == 32 for each in others)
    assert contents(requests[0], 100, "") == ""


IMAGE = SimpleNamespace(mm_position=SimpleNamespace(offset=100, length=12))


@pytest.mark.parametrize(
    ("worker", "changed", "cached", "left"),
    [
        ({}, {}, (), 112),
        ({"in_pass": False}, {}, (), 150),
        ({"verified": 2}, {}, (), 150),
        ({}, {"num_output_tokens": 1}, (), 150),
        ({}, {"prompt_is_token_ids": [True]}, (), 150),
        ({"targets": (150,)}, {}, (), 150),
        ({}, {"mm_features": [IMAGE]}, (), 112),  # it ends right there
        ({"targets": (96,)}, {"mm_features": [IMAGE]}, (), 150),
        ({}, {}, (112,), 150),  # it would have to go back behind that state
    ],
    ids=str,
)
def test_a_prompt_is_cut_only_where_that_serves_and_nothing_is_cut_in_two(worker, changed, cached, left):
    made = Worker(**{"targets": (112,), **worker})
    made.cached.update(cached)
    request = asked(150, **changed)
    made.transfers.stop_at_the_last_state(request)
    assert request.num_prompt_tokens == len(request._all_token_ids) == left
    assert len(request.block_hashes) == left // UNIT


def connector(worker: Worker | None) -> SimpleNamespace:
    """NIXL's half in a scheduler."""
    half = SimpleNamespace(_reqs_need_recv={}, _reqs_need_send={"r": 9.0}, stopped=[])
    half._stop_heartbeat = half.stopped.append
    if worker is not None:
        half.seamark = worker.transfers
    return half


def matched(half: Any, request: Any, computed: int = 0) -> Any:
    """What a connector says of tokens that come from elsewhere; "vLLM's" if that was left to vLLM."""
    return transfers.load_what_was_computed(lambda *_: "vLLM's")(half, request, computed)


@pytest.mark.parametrize(("computed", "told"), [(0, (100, True)), (64, (36, True)), (100, (0, False))])
def test_what_is_loaded_is_what_the_cache_does_not_have_and_who_loads_nothing_is_left_to_vllm(computed, told):
    worker = Worker(targets=(112,))
    request = asked(kv_transfer_params=worker.offer())
    assert matched(connector(worker), request, computed) == told
    assert request.kv_transfer_params["do_remote_prefill"] and request.seamark.loaded == 100
    assert matched(connector(worker), asked()) == matched(connector(None), request) == "vLLM's"
    request.kv_transfer_params = {"do_remote_prefill": False}
    assert matched(connector(worker), request) == "vLLM's" and request.seamark.loaded == 0


@pytest.mark.parametrize("changed", [{transfers.CONTENT: "0" * 32}, {"remote_port": None}, {"number": 7}], ids=str)
def test_what_is_refused_is_computed_and_the_worker_that_has_it_is_told_where_it_can_be(changed):
    worker = Worker()
    half = connector(worker)
    worker.refuses(asked(), worker.offer(number=7))
    request = asked(kv_transfer_params=worker.offer(**changed))
    assert matched(half, request) == (0, False)
    assert request.kv_transfer_params["do_remote_prefill"] is False and half.stopped == ["r"]
    assert half._reqs_need_recv == ({"r": (request, [], (), False)} if transfers.CONTENT in changed else {})


PREFILL = {"do_remote_decode": True, transfers.STOPS: True, "_p_side_truncated": True}


@pytest.mark.parametrize("missing", [None, *PREFILL])
def test_a_prefill_is_cut_only_if_who_loads_it_goes_by_its_length(missing):
    request = asked(150, kv_transfer_params={name: True for name in PREFILL if name != missing})
    assert matched(connector(Worker(targets=(112,))), request) == "vLLM's"
    assert request.num_prompt_tokens == (112 if missing is None else 150)


def test_who_leaves_before_its_turn_has_nothing_told_of_what_another_has_taken():
    worker = Worker()
    first, second = (asked(kv_transfer_params=worker.offer()) for _ in range(2))
    worker.refuses(first, first.kv_transfer_params)

    for request in (first, second):
        transfers.name_what_is_sent(lambda *_: (True, None))(connector(worker), request, ())
    assert first.kv_transfer_params["do_remote_prefill"] and not second.kv_transfer_params["do_remote_prefill"]


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
    for dtype in (torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int8, torch.bool):
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
    sizes = {f"{kind}_parallel_size": 1 for kind in ("data", "tensor", "pipeline")} | {"enable_expert_parallel": False}
    config = SimpleNamespace(parallel_config=SimpleNamespace(**sizes | parallel), kv_transfer_config=None)
    config.model_config = SimpleNamespace(is_moe=True)
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
    return loaded_weights.name_of_files(SimpleNamespace(**config), SimpleNamespace(download_dir=None))


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


@pytest.mark.parametrize(
    ("connector", "is_read"), [("", True), (None, False), ("OffloadingConnector", False), ("NixlConnector", True)]
)
def test_weights_are_read_before_kernels_reorder_them_if_states_come_from_elsewhere(monkeypatch, connector, is_read):
    transfer = connector and SimpleNamespace(kv_connector=connector)
    config = None if connector == "" else SimpleNamespace(kv_transfer_config=transfer)  # nobody has said yet
    monkeypatch.setattr(vllm.config, "get_current_vllm_config_or_none", lambda: config)
    model, name = layers(), loaded_weights.name_of(layers())
    seen: list[Any] = []
    process = loaded_weights.read_what_was_loaded(lambda *given: seen.append((given, getattr(given[0], WEIGHTS, ""))))
    process(model, "config", "device")
    assert seen == [((model, "config", "device"), name if is_read else "")]


def shared(**parts: Any) -> str:
    """The name of a model with a parameter that holds others by their places, as vLLM's shared ones."""
    model = torch.nn.Module()
    model.register_parameter("w", torch.nn.Parameter(torch.zeros(1), requires_grad=False))
    model.w.partitions = parts
    return loaded_weights.name_of(model)


def test_of_a_parameter_that_shares_others_each_is_read_with_its_place():
    a, b = (torch.nn.Parameter(torch.full((3,), value), requires_grad=False) for value in (1.0, 2.0))
    assert len({shared(q=a, k=b), shared(q=b, k=a), shared(q=a), shared(k=a)}) == 4
    assert shared(q=a, k=b) == shared(q=a.clone(), k=b.clone())


@pytest.mark.parametrize("rows", [0, 1, ROWS, ROWS + 1])
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
