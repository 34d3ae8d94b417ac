"""How the core of each recurrent layer is run: as vLLM has it, in a step's segments, or with states kept beside it."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm import forward_context
from vllm.compilation import breakable_cudagraph

from engine_patches import module_source
from engine_patches.families import GLM_KDA, K3_KDA, KIMI_KDA, LING_KDA
from engine_patches.footprint import RUNNING, SCAN_STATES, SEGMENTS
from engine_patches.forward import layers
from engine_patches.forward.segments import Segment
from engine_patches.forward.step_writes import Step, Write

TOKENS, LAYER = 6, "layers.0"


def in_segments() -> dict[str, Any]:
    """A step that is cut behind its fourth token, where the running state goes to block 7."""
    first = Segment(slice(0, 4), "first", torch.tensor([5]), torch.tensor([7]))
    return {SEGMENTS: [first, Segment(torch.tensor([4, 5]), "second")]}


class Scene:
    """A step of six tokens that writes states, and the layer that runs in it."""

    def __init__(self, monkeypatch, **attached: Any) -> None:
        self.step = Step({"r": [Write(4, {0: 1})]}, {LAYER: 0}, ["r"])
        monkeypatch.setattr(RUNNING, "step", self.step)
        self.step.writes_by_row(1)
        self.metadata = SimpleNamespace(**attached)
        self.by_layer: Any = {LAYER: self.metadata}
        self.asked = 0
        monkeypatch.setattr(forward_context, "get_forward_context", self._context)
        self.layer = SimpleNamespace(prefix=LAYER, kv_cache=(torch.zeros(8),))  # block 5 holds the running state
        self.inputs = [torch.arange(TOKENS) * factor for factor in (1, 10, 100)]
        self.output = torch.zeros(TOKENS, dtype=torch.int64)
        self.seen: list[Any] = []

    def _context(self) -> Any:
        self.asked += 1
        return SimpleNamespace(attn_metadata=self.by_layer)

    def core(self, layer: Any, *given: Any, **options: Any) -> str:
        """Adds up its inputs, by token."""
        *inputs, output = (each for each in (*given, *options.values()) if torch.is_tensor(each))
        metadata = self.by_layer.get(LAYER) if isinstance(self.by_layer, dict) else None
        self.seen.append((metadata if torch.is_tensor((*given, output)[0]) else given[0], inputs[0].tolist()))
        layer.kv_cache[0][5] = len(self.seen)
        output.copy_(sum(inputs))
        return "ran"

    def ran_in_segments(self, factor: int) -> None:
        assert self.seen == [("first", [0, 1, 2, 3]), ("second", [4, 5])] and LAYER in self.step._written
        assert self.output.tolist() == [token * factor for token in range(TOKENS)]
        assert self.layer.kv_cache[0][7] == 1, "the state is kept once the first segment has run, and not again"
        assert self.by_layer == {LAYER: self.metadata}, "the step's metadata stands again"

    def ran_whole(self, factor: int, *, wrote: bool = False) -> None:
        assert self.seen == [(self.metadata, list(range(TOKENS)))] and (LAYER in self.step._written) is wrote
        assert self.output.tolist() == [token * factor for token in range(TOKENS)] and self.layer.kv_cache[0][7] == 0


def run_gdn(scene: Scene) -> Any:
    return layers.gdn_in_segments(scene.core)(scene.layer, *scene.inputs, scene.output)


def run_cpu_gdn(scene: Scene) -> Any:
    return layers.cpu_gdn_in_segments(scene.core)(scene.layer, scene.metadata, *scene.inputs, scene.output)


def run_cpu_gdn_beside_drafts(scene: Scene) -> Any:
    def core(layer: Any, metadata: Any, mixed: Any, b: Any, a: Any, output: Any, width: Any, state_len: Any) -> None:
        assert (width, state_len) == (4, 9)
        scene.core(layer, metadata, mixed, b, a, output)

    patched = layers.cpu_gdn_beside_drafts_in_segments(core)
    return patched(scene.layer, scene.metadata, *scene.inputs, scene.output, 4, 9)


def run_convolution(scene: Scene) -> Any:
    return layers.convolution_with_states(scene.core)(scene.layer, scene.inputs[0], scene.output)


def run_mamba2(scene: Scene) -> Any:
    return layers.mamba2_with_states(scene.core)(scene.layer, scene.inputs[0], scene.output)


LOOKED_UP = [run_gdn, run_convolution, run_mamba2]  # by the layer's name


@pytest.mark.parametrize(
    ("run", "factor"),
    [(run_gdn, 111), (run_cpu_gdn, 111), (run_cpu_gdn_beside_drafts, 111), (run_convolution, 1), (run_mamba2, 1)],
)
def test_a_core_runs_in_the_segments_of_its_step_and_otherwise_in_one(monkeypatch, run, factor):
    cut = Scene(monkeypatch, **in_segments())
    assert run(cut) is None
    cut.ran_in_segments(factor)
    whole = Scene(monkeypatch)
    assert run(whole) == ("ran" if run is run_convolution else None), "what vLLM's own returns"
    whole.ran_whole(factor)


@pytest.mark.parametrize(("run", "runner"), [(run_convolution, "run_convolution"), (run_mamba2, "run_layer")])
def test_a_layer_with_states_to_keep_runs_in_one_and_says_that_they_are_written(monkeypatch, run, runner):
    scene, ran = Scene(monkeypatch, **{SCAN_STATES: "states"}, **in_segments()), []

    def keeping(*given: Any) -> None:
        (core,) = filter(callable, given)
        ran.append(([each for each in given if each is not core], core()))

    monkeypatch.setattr(layers, runner, keeping)
    run(scene)
    more = [scene.layer, "states", scene.metadata, scene.inputs[0]] if run is run_mamba2 else ["states"]
    assert [(len(given), told) for given, told in ran] == [(len(more), "ran")]
    assert all(one is other for one, other in zip(ran[0][0], more, strict=True))
    scene.ran_whole(1, wrote=True)


@pytest.mark.parametrize("run", LOOKED_UP)
@pytest.mark.parametrize("by_layer", [None, {}, {"layers.1": SimpleNamespace(**in_segments())}])
def test_a_layer_without_metadata_runs_as_ever_and_a_step_that_writes_nothing_does_not_look(monkeypatch, run, by_layer):
    """As when vLLM measures what a pass takes."""
    scene = Scene(monkeypatch)
    scene.by_layer = by_layer
    run(scene)
    assert [metadata for metadata, _ in scene.seen] == [None] and LAYER not in scene.step._written
    idle = Scene(monkeypatch, **in_segments())
    idle.step.writes = {}
    run(idle)
    assert idle.asked == 0 and len(idle.seen) == 1


# The tensors that `_forward` of each class takes, beside the layer; `core_attn_out` is filled.
KDA_CALLS = {
    KIMI_KDA: ("mixed_qkv", "g1", "g2", "beta", "core_attn_out"),
    K3_KDA: ("mixed_qkv", "g1", "g2", "beta", "core_attn_out"),
    GLM_KDA: ("qkv_proj_states", "g1", "beta", "core_attn_out"),
    LING_KDA: ("q_proj_states", "k_proj_states", "v_proj_states", "g1", "beta", "core_attn_out"),
}

WIDTH = 3


def kda_tensors(names: Sequence[str]) -> dict[str, torch.Tensor]:
    drawn = {name: torch.randn(*((1,) if name in layers._BEHIND_ONE else ()), TOKENS, WIDTH) for name in names}
    return {**drawn, "core_attn_out": torch.zeros(1, TOKENS, WIDTH)}


def kda_core(layer: Any, **tensors: Any) -> None:
    """A core that adds up, by token, whatever it is given."""
    inputs = [tensor.reshape(-1, WIDTH) for name, tensor in tensors.items() if name != "core_attn_out"]
    tensors["core_attn_out"].copy_(sum(inputs)[None])


@pytest.mark.parametrize("layer", KDA_CALLS, ids=lambda layer: layer.name)
def test_a_kda_core_is_called_as_vllms_source_says_and_runs_in_segments_as_in_one_piece(monkeypatch, layer):
    names = KDA_CALLS[layer]
    (definition,) = module_source.definitions(*f"{layer.path}._forward".split(":"))
    assert definition.parameters == ", ".join(("self", *names))
    segments = [Segment(slice(0, 3), "a"), Segment(torch.tensor([5, 3]), "b"), Segment(slice(4, 5), "c")]
    scene = Scene(monkeypatch, **{SEGMENTS: segments})
    tensors = kda_tensors(names)
    right = {**tensors, "core_attn_out": tensors["core_attn_out"].clone()}
    kda_core(None, **right)
    layers.kda_in_segments(kda_core)(scene.layer, **tensors)
    assert torch.equal(tensors["core_attn_out"], right["core_attn_out"])


class Capturing(SimpleNamespace):
    """A capture of a pass in graphs, with breaks between them."""

    _capturing = True

    def add_eager(self, run: Any) -> None:
        run()
        self.replayed = run


def test_a_replayed_graph_calls_the_replacement_of_a_kda_core(monkeypatch):
    ran, capture, scene = [], Capturing(), Scene(monkeypatch, **in_segments())
    monkeypatch.setattr(breakable_cudagraph, "is_breakable_cudagraph_enabled", lambda: True)
    monkeypatch.setattr(breakable_cudagraph, "weak_ref_tensor", lambda tensor: tensor)  # of a GPU
    monkeypatch.setattr(breakable_cudagraph.BreakableCUDAGraphCapture._tls, "active", capture, raising=False)

    def core(layer: Any, *, g1: Any, core_attn_out: Any) -> None:
        ran.append(len(g1[0]))

    scene.by_layer = None
    replaced = layers.kda_in_segments(breakable_cudagraph.eager_break_during_capture(core))
    replaced(scene.layer, **kda_tensors(["g1"]))
    scene.by_layer = {LAYER: scene.metadata}
    capture.replayed()
    assert ran == [TOKENS, 4, 2]
