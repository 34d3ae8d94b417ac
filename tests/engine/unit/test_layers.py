"""States are written inside a pass only where every layer and worker does so; how a step is cut and each core runs."""

from __future__ import annotations

import inspect
import pickle
from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import vllm.platforms
from vllm import forward_context
from vllm.compilation import breakable_cudagraph
from vllm.config import CompilationConfig
from vllm.model_executor.layers.mamba import mamba_mixer2
from vllm.model_executor.layers.mamba.gdn import qwen_gdn_linear_attn
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.kv_cache_interface import FullAttentionSpec, MambaSpec

from engine_patches import families, ledger, module_source, speculation
from engine_patches.footprint import RUNNING, SCAN_STATES, SEGMENTS
from engine_patches.forward import layers, segments
from engine_patches.forward.layers import is_promised, promise, promise_writes_in_forward, runs_whole_steps
from engine_patches.forward.segments import Segment
from engine_patches.forward.step_writes import Step, Write


def recurrent(promised: bool) -> MambaSpec:
    spec = MambaSpec(block_size=64, shapes=((1,),), dtypes=(torch.float32,))
    if promised:
        promise(spec)
    return spec


ATTENTION = FullAttentionSpec(block_size=64, num_kv_heads=1, head_size=1, dtype=torch.float32)


@pytest.mark.parametrize(
    ("workers", "holds"),
    [
        ([{"m": True}, {"m": True}], True),
        ([{"m": True}, {"m": False}], False),
        ([{"m": True, "k": False}], False),
    ],
)
def test_one_worker_or_layer_without_a_promise_takes_it_from_all(engine_log, workers, holds):
    specs = [{"a": ATTENTION} | {name: recurrent(each) for name, each in worker.items()} for worker in workers]
    find = layers.require_promise_of_all(lambda self: specs)
    for _ in range(2):  # asked again: there is nothing left to be taken back
        assert find(None) is specs
        found = {is_promised(spec) for worker in specs for spec in worker.values() if spec is not ATTENTION}
        assert found == {holds} and all(worker["m"].shapes == ((1,),) for worker in specs)
    assert len(engine_log.messages) == (not holds and any(True in worker.values() for worker in workers))


def test_a_promise_survives_vllms_copies_and_the_way_between_processes():
    spec = recurrent(True)
    assert spec == recurrent(False) and hash(spec.shapes) == hash(recurrent(False).shapes)
    padded = replace(spec, page_size_padded=4096)
    travelled = pickle.loads(pickle.dumps(padded))  # noqa: S301 - as vLLM's processes do
    assert is_promised(padded) and is_promised(travelled)
    assert travelled == replace(recurrent(False), page_size_padded=4096)


class Builder:
    def build(self) -> str:
        return "metadata"

    def update_block_table(self, metadata: Any) -> Any:
        return metadata


class Recurrent:
    builder = Builder

    def _core(self) -> str:
        return "ran"

    def get_attn_backend(self) -> Any:
        return SimpleNamespace(get_builder_cls=lambda: self.builder)


def other(self: Any) -> None:
    """Another function than the one that is known."""


OwnBuilder, LikeBuilder = (type("Own", (Builder,), changed) for changed in ({"build": other}, {}))

WithItsOwnCore, WithItsOwnMetadata, WithoutACore, WithKnownMetadata = (
    type("Changed", (Recurrent,), changed)
    for changed in ({"_core": other}, {"builder": OwnBuilder}, {"_core": None}, {"builder": LikeBuilder})
)

Replaced = type("Replaced", (Recurrent,), {"_core": replace})  # as another plugin does it, with a function of its own


def known_as(monkeypatch, path: str = f"{__name__}:Recurrent", **options: Any) -> None:
    """The layer, its kind of core and its builder are those in the tables; what is replaced adds a word."""

    def added(original: Any) -> Any:
        return lambda self, *given: ("kept", original(self, *given))

    row = families.RecurrentLayer(path, families.GDN, families.Shown.READ, "_core", **options)
    monkeypatch.setattr(layers, "INSIDE", (row,))
    monkeypatch.setattr(layers, "CORES", {families.GDN: layers.Core(added, None, ())})
    monkeypatch.setattr(layers, "BUILDERS", {f"{__name__}:Builder": added})


@pytest.mark.parametrize(
    ("platform", "options", "config", "drafts", "promises"),
    [
        ("cpu", {}, set(), "", True),
        ("cpu", {}, {"v2"}, "", False),
        ("cuda", {}, set(), "", True),
        ("cuda", {}, {"v2"}, "", True),
        ("rocm", {}, set(), "", False),
        ("rocm", {"on_rocm": True}, set(), "", True),
        ("cuda", {}, {"replays"}, "", False),
        ("cuda", {}, {"ubatching"}, "", False),
        ("cuda", {}, set(), "unsupported", False),
        ("cuda", {}, set(), "supported", False),  # this layer's rows beside drafts are not known
        ("cuda", {"drafts": True}, set(), "supported", True),
        ("cuda", {"layer": WithItsOwnCore}, set(), "", False),
        ("cuda", {"layer": WithItsOwnMetadata}, set(), "", False),
        ("cuda", {"layer": WithKnownMetadata}, set(), "", True),
        ("cuda", {"layer": WithoutACore}, set(), "", False),
        ("cuda", {"layer": Replaced, "path": f"{__name__}:Replaced"}, set(), "", False),
        ("cuda", {"path": "never.imported:Recurrent"}, set(), "", False),
    ],
)
def test_a_layer_promises_where_all_that_runs_it_is_known(monkeypatch, platform, options, config, drafts, promises):
    layer = options.pop("layer", Recurrent)
    known_as(monkeypatch, **options)
    here = SimpleNamespace(is_cpu=lambda: platform == "cpu", is_cuda=lambda: platform == "cuda")
    monkeypatch.setattr(vllm.platforms, "current_platform", here)
    monkeypatch.setattr(speculation, "unsupported", lambda _: "why" if drafts == "unsupported" else None)
    monkeypatch.setattr(speculation, "drafting", lambda _: bool(drafts))
    vllm_config = SimpleNamespace(
        cache_config=SimpleNamespace(use_replayssm="replays" in config),
        parallel_config=SimpleNamespace(use_ubatching="ubatching" in config),
        use_v2_model_runner="v2" in config,
    )
    assert layers._writes_in_forward(layer(), vllm_config) is promises
    assert runs_whole_steps(vllm_config) is not ({"replays", "ubatching"} & config != set())


@pytest.mark.parametrize(
    ("has_spec", "writes", "live", "promised"),
    [(True, True, True, True), (True, False, True, False), (True, True, False, False), (False, True, True, None)],
)
def test_a_spec_carries_the_promise_only_of_a_layer_that_keeps_it_with_live_patches(
    monkeypatch, has_spec, writes, live, promised
):
    relied: list[bool] = []
    known_as(monkeypatch)
    monkeypatch.setattr(layers, "_writes_in_forward", lambda layer, config: writes)
    monkeypatch.setattr(ledger, "rely_on_patches", lambda: relied.append(live) or live)
    spec, layer = recurrent(False) if has_spec else None, Recurrent()
    for _ in range(2):  # vLLM asks more than once
        assert promise_writes_in_forward(lambda self, config: spec)(layer, None) is spec
    assert len(relied) == 2 * (has_spec and writes), "nobody relies on them for a layer that cannot"
    assert spec is None or (is_promised(spec) is promised and spec.shapes == ((1,),))
    assert layer._core() == (("kept", "ran") if promised else "ran") and Recurrent()._core() == "ran"


def test_known_builders_of_metadata_plan_states_and_all_others_stay(monkeypatch):
    known_as(monkeypatch)
    monkeypatch.setattr(layers, "take_states_over", lambda original: lambda self, given: [original(self, given)])
    known, own = builders = LikeBuilder(), OwnBuilder()
    layers.plan_where_metadata_is_made(lambda group: None)(SimpleNamespace(metadata_builders=builders))
    assert known.build() == ("kept", "metadata") and known.update_block_table(1) == [1]
    assert own.build() is None and own.update_block_table(1) == 1


@dataclass
class Metadata:
    """What a recurrent backend makes of a step in which nobody decodes."""

    seq_lens: list[int]
    state_indices_tensor_p: torch.Tensor
    state_indices_tensor_d: torch.Tensor | None = None
    num_decodes: int = 0

    @classmethod
    def of(cls, common: CommonAttentionMetadata) -> Metadata:
        return cls(common.seq_lens.tolist(), common.block_table_tensor[:, 0])


# Two cache groups with a layer each, and two prompts whose states run in the blocks 5 and 6, and 15 and 16.
LAYERS = {"layers.0": 0, "layers.1": 1}

PROMPTS = CommonAttentionMetadata(
    query_start_loc=torch.tensor([0, 4, 7], dtype=torch.int32),
    query_start_loc_cpu=torch.tensor([0, 4, 7], dtype=torch.int32),
    seq_lens=torch.tensor([4, 3], dtype=torch.int32),
    seq_lens_cpu_upper_bound=torch.tensor([4, 3], dtype=torch.int32),
    num_reqs=2,
    num_actual_tokens=7,
    max_query_len=4,
    max_seq_len=4,
    block_table_tensor=torch.tensor([[5], [6]]),
    slot_mapping=torch.arange(7),
)


def planned(monkeypatch, step: Step | None) -> Metadata:
    """Metadata of a step with these two prompts."""
    monkeypatch.setattr(RUNNING, "step", step)
    build = segments.plan_segments(lambda self, _, common: Metadata.of(common))
    return build(SimpleNamespace(layer_names=["layers.0"]), 0, PROMPTS)


@pytest.mark.parametrize(
    ("row", "offset", "tokens", "seq_lens", "rows"),
    [
        ("a", 2, [torch.tensor([0, 1, 4, 5, 6]), slice(2, 4)], [[2, 3], [4]], [[0, 1], [0]]),
        ("b", 1, [slice(0, 5), slice(5, 7)], [[4, 1], [3]], [[0, 1], [1]]),  # what follows is read without a copy
        ("b", 3, [slice(None)], [[4, 3]], [[0, 1]]),
    ],
)
def test_each_cache_group_runs_the_same_segments_on_blocks_of_its_own(monkeypatch, row, offset, tokens, seq_lens, rows):
    first = planned(monkeypatch, Step({row: [Write(offset, {0: 8, 1: 18})]}, LAYERS, ["a", "b"]))
    update = segments.take_states_over(lambda self, made, table: replace(made, state_indices_tensor_p=table[:, 0]))
    second = update(SimpleNamespace(layer_names=["layers.1"]), first, torch.tensor([[15], [16]]))
    third = update(SimpleNamespace(layer_names=["layers.0"]), second, torch.tensor([[5], [6]]))
    for metadata, blocks, target in ((first, (5, 6), 8), (second, (15, 16), 18), (third, (5, 6), 8)):
        made = getattr(metadata, SEGMENTS)
        for segment, expected in zip(made, tokens, strict=True):
            assert type(segment.tokens) is type(expected)
            assert torch.equal(torch.arange(7)[segment.tokens], torch.arange(7)[expected])
        assert [segment.metadata.seq_lens for segment in made] == seq_lens
        running = [segment.metadata.state_indices_tensor_p.tolist() for segment in made]
        assert running == [[blocks[each] for each in ran] for ran in rows]
        assert made[0].targets.tolist() == [target] and made[0].sources.tolist() == [blocks["ab".index(row)]]
        assert all(segment.targets is None for segment in made[1:])


@pytest.mark.parametrize(
    ("op", "module", "calls"),
    [
        ("mamba_mixer2", mamba_mixer2, "self.conv_ssm_forward("),
        ("qwen_gdn_attention_core", qwen_gdn_linear_attn, "self._forward_core("),
        ("qwen_gdn_attention_core_fused_norm_packed", qwen_gdn_linear_attn, "self._forward_core_fused_norm_packed("),
    ],
)
def test_the_layers_run_between_graphs_that_are_captured(op, module, calls):
    """A compiled model is split at these ops, and a breakable capture breaks at them: they run as Python each time."""
    assert f"vllm::{op}" in CompilationConfig._attention_ops
    assert calls in inspect.getsource(getattr(module, op))
    assert inspect.getsource(module).split(f"def {op}(")[0].rstrip().endswith("@eager_break_during_capture")


def test_the_other_cores_are_looked_up_on_each_replay():
    """Of Mamba2, of gated delta nets and of convolutions: what breaks a capture calls them by their names."""
    for layer, name in (
        (families.QWEN_NGRAM, "_short_conv"),
        (families.SHORT_CONVOLUTION, "short_conv"),
        (families.OLMO_GDN, "_full_forward"),
    ):
        module, _, owner = layer.path.partition(":")
        attribute = name if layer is families.SHORT_CONVOLUTION else f"{owner}.{name}"
        (definition,) = module_source.definitions(module, attribute)
        assert f"self.{layer.core}(" in definition.source, layer


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
        assert self.seen == [("first", [0, 1, 2, 3]), ("second", [4, 5])] and LAYER in self.step.written
        assert self.output.tolist() == [token * factor for token in range(TOKENS)]
        assert self.layer.kv_cache[0][7] == 1, "the state is kept once the first segment has run, and not again"
        assert self.by_layer == {LAYER: self.metadata}, "the step's metadata stands again"

    def ran_whole(self, factor: int, *, wrote: bool = False) -> None:
        assert self.seen == [(self.metadata, list(range(TOKENS)))] and (LAYER in self.step.written) is wrote
        assert self.output.tolist() == [token * factor for token in range(TOKENS)] and self.layer.kv_cache[0][7] == 0


def beside_drafts(core: Any) -> Any:
    """The core for CPUs, which is given two numbers more."""

    def more(layer: Any, metadata: Any, mixed: Any, b: Any, a: Any, output: Any, width: Any, state_len: Any) -> None:
        assert (width, state_len) == (4, 9)
        core(layer, metadata, mixed, b, a, output)

    return more


def run(core: str, scene: Scene) -> Any:
    """As vLLM calls it."""
    layer, first, of_step = scene.layer, scene.inputs[0], (*scene.inputs, scene.output)
    if core == "gdn":
        return layers.gdn_in_segments(scene.core)(layer, *of_step)
    if core == "cpu":
        return layers.cpu_gdn_in_segments(scene.core)(layer, scene.metadata, *of_step)
    if core == "cpu beside drafts":
        patched = layers.cpu_gdn_in_segments(beside_drafts(scene.core))
        return patched(layer, scene.metadata, *of_step, 4, 9)
    patch = layers.convolution_with_states if core == "convolution" else layers.mamba2_with_states
    return patch(scene.core)(layer, first, scene.output)


@pytest.mark.parametrize(
    ("core", "factor"), [("gdn", 111), ("cpu", 111), ("cpu beside drafts", 111), ("convolution", 1), ("mamba2", 1)]
)
def test_a_core_runs_in_the_segments_of_its_step_and_otherwise_in_one(monkeypatch, core, factor):
    cut = Scene(monkeypatch, **in_segments())
    assert run(core, cut) is None
    cut.ran_in_segments(factor)
    whole = Scene(monkeypatch)
    assert run(core, whole) == ("ran" if core == "convolution" else None), "what vLLM's own returns"
    whole.ran_whole(factor)


@pytest.mark.parametrize(("core", "runner"), [("convolution", "run_convolution"), ("mamba2", "run_layer")])
def test_a_layer_with_states_to_keep_runs_in_one_and_says_that_they_are_written(monkeypatch, core, runner):
    scene, ran = Scene(monkeypatch, **{SCAN_STATES: "states"}, **in_segments()), []

    def keeping(*given: Any) -> None:
        (run_core,) = filter(callable, given)
        ran.append(([each for each in given if each is not run_core], run_core()))

    monkeypatch.setattr(layers, runner, keeping)
    run(core, scene)
    more = [scene.layer, "states", scene.metadata, scene.inputs[0]] if core == "mamba2" else ["states"]
    assert [(len(given), told) for given, told in ran] == [(len(more), "ran")]
    assert all(one is other for one, other in zip(ran[0][0], more, strict=True))
    scene.ran_whole(1, wrote=True)


@pytest.mark.parametrize("core", ["gdn", "convolution", "mamba2"])  # looked up by the layer's name
@pytest.mark.parametrize("by_layer", [None, {}, {"layers.1": SimpleNamespace(**in_segments())}])
def test_a_layer_without_metadata_runs_as_ever_and_a_step_that_writes_nothing_does_not_look(
    monkeypatch, core, by_layer
):
    """As when vLLM measures what a pass takes."""
    scene = Scene(monkeypatch)
    scene.by_layer = by_layer
    run(core, scene)
    assert [metadata for metadata, _ in scene.seen] == [None] and LAYER not in scene.step.written
    idle = Scene(monkeypatch, **in_segments())
    idle.step.writes = {}
    run(core, idle)
    assert idle.asked == 0 and len(idle.seen) == 1


WIDTH = 3


def kda_tensors(names: Sequence[str]) -> dict[str, torch.Tensor]:
    drawn = {name: torch.randn(*((1,) if name in layers._BEHIND_ONE else ()), TOKENS, WIDTH) for name in names}
    return {**drawn, "core_attn_out": torch.zeros(1, TOKENS, WIDTH)}


def kda_core(layer: Any, **tensors: Any) -> None:
    """A core that adds up, by token, whatever it is given."""
    inputs = [tensor.reshape(-1, WIDTH) for name, tensor in tensors.items() if name != "core_attn_out"]
    tensors["core_attn_out"].copy_(sum(inputs)[None])


@pytest.mark.parametrize("layer", [each for each in families.INSIDE if each.kind is families.KDA])
def test_a_kda_core_is_called_as_vllms_source_says_and_runs_in_segments_as_in_one_piece(monkeypatch, layer):
    (definition,) = module_source.definitions(*f"{layer.path}.{layer.core}".split(":"))
    owner, *names = definition.parameters.split(", ")
    assert owner == "self" and names[-1] == "core_attn_out" and {*layers._BEHIND_ONE} <= {*names}
    segments = [Segment(slice(0, 3), "a"), Segment(torch.tensor([5, 3]), "b"), Segment(slice(4, 5), "c")]
    scene = Scene(monkeypatch, **{SEGMENTS: segments})
    tensors = kda_tensors(names)
    right = {**tensors, "core_attn_out": tensors["core_attn_out"].clone()}
    kda_core(None, **right)
    layers.kda_in_segments(kda_core)(scene.layer, **tensors)
    assert torch.equal(tensors["core_attn_out"], right["core_attn_out"])


def test_a_replayed_graph_calls_the_replacement_of_a_kda_core(monkeypatch):
    ran, eager, scene = [], [], Scene(monkeypatch, **in_segments())
    # A capture of a pass in graphs, with breaks between them.
    capture = SimpleNamespace(_capturing=True, add_eager=lambda run: run() or eager.append(run))
    monkeypatch.setattr(breakable_cudagraph, "is_breakable_cudagraph_enabled", lambda: True)
    monkeypatch.setattr(breakable_cudagraph, "weak_ref_tensor", lambda tensor: tensor)  # of a GPU
    monkeypatch.setattr(breakable_cudagraph.BreakableCUDAGraphCapture._tls, "active", capture, raising=False)

    def core(layer: Any, *, g1: Any, core_attn_out: Any) -> None:
        ran.append(len(g1[0]))

    scene.by_layer = None
    replaced = layers.kda_in_segments(breakable_cudagraph.eager_break_during_capture(core))
    replaced(scene.layer, **kda_tensors(["g1"]))
    scene.by_layer = {LAYER: scene.metadata}
    eager[0]()
    assert ran == [TOKENS, 4, 2]
