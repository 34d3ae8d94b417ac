"""States are written inside a pass only if every worker and layer does so; a layer runs in its step's segments."""

from types import SimpleNamespace

import pytest
import torch
from vllm import forward_context
from vllm.v1.kv_cache_interface import FullAttentionSpec, MambaSpec

from engine_patches.forward import segments
from engine_patches.forward.layers import WRITES_IN_FORWARD, _ran_in_segments, require_promise_of_all
from engine_patches.forward.segments import SEGMENTS, Segment


def recurrent(promised: bool) -> MambaSpec:
    spec = MambaSpec(block_size=64, shapes=((1,),), dtypes=(torch.float32,))
    if promised:
        object.__setattr__(spec, WRITES_IN_FORWARD, True)
    return spec


def promised_after(*of_workers: dict) -> list[bool]:
    get_kv_cache_specs = require_promise_of_all(lambda self: list(of_workers))
    found = get_kv_cache_specs(None)
    return [
        getattr(spec, WRITES_IN_FORWARD, False)
        for specs in found
        for spec in specs.values()
        if isinstance(spec, MambaSpec)
    ]


def test_a_promise_of_all_holds():
    attention = FullAttentionSpec(block_size=64, num_kv_heads=1, head_size=1, dtype=torch.float32)
    assert promised_after({"m": recurrent(True), "a": attention}, {"m": recurrent(True)}) == [True, True]


def test_one_worker_or_layer_without_it_takes_it_from_all():
    assert promised_after({"m": recurrent(True)}, {"m": recurrent(False)}) == [False, False]
    assert promised_after({"m": recurrent(True), "k": recurrent(False)}) == [False, False]
    assert promised_after({"m": recurrent(False)}) == [False]


class Layer:
    """A recurrent layer under its name, in a step of six tokens that is cut after the fourth."""

    prefix = "layers.0"

    def __init__(self, monkeypatch) -> None:
        first, second = Segment(slice(0, 4), "first"), Segment(torch.tensor([4, 5]), "second")
        self.metadata = SimpleNamespace(**{SEGMENTS: [first, second]})
        self.by_layer = {self.prefix: self.metadata}
        self.kv_cache: tuple = ()
        self.seen: list[tuple[str, list[int]]] = []
        monkeypatch.setattr(
            forward_context, "get_forward_context", lambda: SimpleNamespace(attn_metadata=self.by_layer)
        )

    def core(self, layer, tokens, output) -> None:
        self.seen.append((self.by_layer[self.prefix], tokens.tolist()))
        output.copy_(tokens * 10)


def test_each_segment_runs_on_its_own_metadata_and_the_steps_stands_again_after_them(monkeypatch):
    layer, output = Layer(monkeypatch), torch.zeros(6, dtype=torch.int64)
    assert _ran_in_segments(layer, layer.core, (torch.arange(6),), output)
    assert layer.seen == [("first", [0, 1, 2, 3]), ("second", [4, 5])]
    assert output.tolist() == [0, 10, 20, 30, 40, 50]
    assert layer.by_layer == {"layers.0": layer.metadata}


def test_the_steps_metadata_stands_again_after_a_segment_that_failed(monkeypatch):
    layer = Layer(monkeypatch)

    def failing(layer, tokens, output):
        raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        _ran_in_segments(layer, failing, (torch.arange(6),), torch.zeros(6))
    assert layer.by_layer == {"layers.0": layer.metadata}


GROUP = 1  # a cache group with one layer


def planned(monkeypatch, step: segments.Step | None) -> SimpleNamespace:
    """Metadata of a step with two prompts, of 4 and 3 tokens, whose states run in the blocks 5 and 6."""
    monkeypatch.setattr(segments, "_step", step)
    metadata = SimpleNamespace(state_indices_tensor_d=None, state_indices_tensor_p=torch.tensor([5, 6]))
    batch = SimpleNamespace(
        num_reqs=2,
        query_start_loc_cpu=torch.tensor([0, 4, 7]),
        seq_lens_cpu_upper_bound=torch.tensor([4, 3]),
    )
    build = segments.plan_segments(lambda self, *_: metadata)
    assert build(SimpleNamespace(layer_names=["layers.0"]), 0, batch) is metadata
    return metadata


def test_a_state_is_copied_to_its_block_once_the_segment_before_it_has_run(monkeypatch):
    step = segments.Step({"b": [segments.Write(3, {GROUP: 9})]}, {"layers.0": GROUP}, ["a", "b"])
    (segment,) = getattr(planned(monkeypatch, step), SEGMENTS)
    assert segment.tokens == slice(None)
    blocks = torch.arange(20).reshape(10, 2)
    segment.keep_states([blocks])
    assert blocks[9].tolist() == blocks[6].tolist() == [12, 13]


@pytest.mark.parametrize("step", [None, segments.Step({}, {"layers.0": GROUP}, ["a", "b"])])
def test_a_step_without_writes_runs_in_one(monkeypatch, step):
    assert not hasattr(planned(monkeypatch, step), SEGMENTS)
