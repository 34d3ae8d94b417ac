"""States are written inside a pass only if every worker and layer does so; a layer runs in its step's segments."""

import ast
import inspect
import pickle
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace

import pytest
import torch
from vllm import forward_context
from vllm.compilation import breakable_cudagraph
from vllm.config import CompilationConfig
from vllm.model_executor.layers.mamba import mamba_mixer2
from vllm.model_executor.layers.mamba.gdn import qwen_gdn_linear_attn
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.kv_cache_interface import FullAttentionSpec, MambaSpec

from engine_patches import ledger, module_source, speculation
from engine_patches.families import (
    GDN,
    GLM_KDA,
    K3_KDA,
    KIMI_KDA,
    LING_KDA,
    OLMO_GDN,
    QWEN_NGRAM,
    SHORT_CONVOLUTION,
    RecurrentLayer,
    Shown,
)
from engine_patches.footprint import RUNNING, SEGMENTS
from engine_patches.forward import layers, segments
from engine_patches.forward.layers import (
    _BEHIND_ONE,
    _ran_in_segments,
    is_promised,
    kda_in_segments,
    promise,
    require_promise_of_all,
)
from engine_patches.forward.segments import Segment
from engine_patches.forward.step_writes import Step, Write


def recurrent(promised: bool) -> MambaSpec:
    spec = MambaSpec(block_size=64, shapes=((1,),), dtypes=(torch.float32,))
    if promised:
        promise(spec)
    return spec


def promised_after(*of_workers: dict) -> list[bool]:
    get_kv_cache_specs = require_promise_of_all(lambda self: list(of_workers))
    found = get_kv_cache_specs(None)
    return [is_promised(spec) for specs in found for spec in specs.values() if isinstance(spec, MambaSpec)]


def test_a_promise_of_all_holds():
    attention = FullAttentionSpec(block_size=64, num_kv_heads=1, head_size=1, dtype=torch.float32)
    assert promised_after({"m": recurrent(True), "a": attention}, {"m": recurrent(True)}) == [True, True]


def test_one_worker_or_layer_without_it_takes_it_from_all():
    assert promised_after({"m": recurrent(True)}, {"m": recurrent(False)}) == [False, False]
    assert promised_after({"m": recurrent(True), "k": recurrent(False)}) == [False, False]
    assert promised_after({"m": recurrent(False)}) == [False]


def test_a_promise_survives_vllms_copies_and_the_way_between_processes():
    spec = recurrent(True)
    assert spec == recurrent(False) and hash(spec.shapes) == hash(recurrent(False).shapes)
    padded = replace(spec, page_size_padded=4096)
    travelled = pickle.loads(pickle.dumps(padded))  # noqa: S301 - as vLLM's processes do
    assert is_promised(padded) and is_promised(travelled)
    assert travelled == replace(recurrent(False), page_size_padded=4096)


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


def replaced(name: str):
    """A function that the ledger has put in the place of vLLM's."""

    def function(self) -> None:
        pass

    setattr(function, ledger.NAME, name)
    return function


def vllms(self) -> None:
    """A function that is as vLLM has it."""


class Builder:
    build = replaced("states")


class Recurrent:
    _core = replaced("core")
    builder = Builder

    def get_attn_backend(self):
        return SimpleNamespace(get_builder_cls=lambda: self.builder)


class WithItsOwnCore(Recurrent):
    _core = vllms


class WithItsOwnMetadata(Recurrent):
    builder = type("Other", (), {"build": vllms})


class WithoutACore(Recurrent):
    _core = None


CONFIGURED = SimpleNamespace(
    speculative_config=None,
    cache_config=SimpleNamespace(use_replayssm=False),
    parallel_config=SimpleNamespace(use_ubatching=False),
    use_v2_model_runner=False,
)


@pytest.mark.parametrize(
    ("layer", "promises"),
    [(Recurrent, True), (WithItsOwnCore, False), (WithItsOwnMetadata, False), (WithoutACore, False), (Builder, False)],
)
def test_a_layer_promises_only_if_its_own_core_and_what_makes_its_metadata_are_replaced(monkeypatch, layer, promises):
    known = RecurrentLayer(f"{__name__}:Recurrent", GDN, Shown.READ, "_core")
    monkeypatch.setattr(layers, "INSIDE", (known,))
    assert layers._writes_in_forward(layer(), CONFIGURED) is promises


def test_beside_drafts_a_layer_promises_only_if_its_rows_are_known_to_keep_their_states(monkeypatch):
    monkeypatch.setattr(speculation, "unsupported", lambda config: None)
    monkeypatch.setattr(speculation, "drafting", lambda config: True)
    for beside_drafts in (True, False):
        known = RecurrentLayer(f"{__name__}:Recurrent", GDN, Shown.READ, "_core", beside_drafts=beside_drafts)
        monkeypatch.setattr(layers, "INSIDE", (known,))
        assert layers._writes_in_forward(Recurrent(), CONFIGURED) is beside_drafts


# The tensors that `_forward` of each class takes, beside the layer; `core_attn_out` is filled.
KDA_CALLS = {
    KIMI_KDA.name: ("mixed_qkv", "g1", "g2", "beta", "core_attn_out"),
    K3_KDA.name: ("mixed_qkv", "g1", "g2", "beta", "core_attn_out"),
    GLM_KDA.name: ("qkv_proj_states", "g1", "beta", "core_attn_out"),
    LING_KDA.name: ("q_proj_states", "k_proj_states", "v_proj_states", "g1", "beta", "core_attn_out"),
}

TOKENS, WIDTH = 7, 3


def kda_tensors(names: Sequence[str]) -> dict[str, torch.Tensor]:
    drawn = {name: torch.randn(*((1,) if name in _BEHIND_ONE else ()), TOKENS, WIDTH) for name in names}
    return {**drawn, "core_attn_out": torch.zeros(1, TOKENS, WIDTH)}


def kda_core(layer, **tensors) -> None:
    """A core that adds up, by token, whatever it is given."""
    inputs = [tensor.reshape(-1, WIDTH) for name, tensor in tensors.items() if name != "core_attn_out"]
    tensors["core_attn_out"].copy_(sum(inputs)[None])


@pytest.mark.parametrize("layer", [KIMI_KDA, K3_KDA, GLM_KDA, LING_KDA], ids=lambda layer: layer.name)
def test_a_kda_core_is_called_as_vllms_source_says_and_runs_in_segments_as_in_one_piece(monkeypatch, layer):
    names = KDA_CALLS[layer.name]
    (definition,) = module_source.definitions(*f"{layer.path}._forward".split(":"))
    assert definition.parameters == ", ".join(("self", *names))
    segments = [Segment(slice(0, 4), "a"), Segment(torch.tensor([6, 4]), "b"), Segment(slice(5, 6), "c")]
    by_layer = {"l": SimpleNamespace(**{SEGMENTS: segments})}
    monkeypatch.setattr(forward_context, "get_forward_context", lambda: SimpleNamespace(attn_metadata=by_layer))
    monkeypatch.setattr(RUNNING, "step", Step({"r": [Write(1, {0: 1})]}, {"l": 0}, ["r"]))
    tensors = kda_tensors(names)
    right = {**tensors, "core_attn_out": tensors["core_attn_out"].clone()}
    kda_core(None, **right)
    kda_in_segments(kda_core)(SimpleNamespace(prefix="l", kv_cache=()), **tensors)
    assert torch.equal(tensors["core_attn_out"], right["core_attn_out"])


class Capturing(SimpleNamespace):
    """A capture of a pass in graphs, with breaks between them."""

    _capturing = True

    def add_eager(self, run) -> None:
        run()
        self.replayed = run


def test_a_replayed_graph_calls_the_replacement_of_a_kda_core(monkeypatch):
    ran, capture = [], Capturing()
    monkeypatch.setattr(breakable_cudagraph, "is_breakable_cudagraph_enabled", lambda: True)

    def core(layer, *, g1, core_attn_out) -> None:
        ran.append(len(g1[0]))

    replaced = kda_in_segments(breakable_cudagraph.eager_break_during_capture(core))
    monkeypatch.setattr(breakable_cudagraph, "weak_ref_tensor", lambda tensor: tensor)  # of a GPU
    layer = SimpleNamespace(prefix="l", kv_cache=())
    tensors = {"g1": torch.zeros(1, TOKENS, WIDTH), "core_attn_out": torch.zeros(1, TOKENS, WIDTH)}
    monkeypatch.setattr(breakable_cudagraph.BreakableCUDAGraphCapture._tls, "active", capture, raising=False)
    monkeypatch.setattr(forward_context, "get_forward_context", lambda: SimpleNamespace(attn_metadata=None))
    replaced(layer, **tensors)
    assert ran == [TOKENS]
    segments = [Segment(slice(0, 4), "a"), Segment(slice(4, 7), "b")]
    by_layer = {"l": SimpleNamespace(**{SEGMENTS: segments})}
    monkeypatch.setattr(forward_context, "get_forward_context", lambda: SimpleNamespace(attn_metadata=by_layer))
    monkeypatch.setattr(RUNNING, "step", Step({"r": [Write(4, {0: 1})]}, {"l": 0}, ["r"]))
    capture.replayed()
    assert ran == [TOKENS, 4, 3]


def test_the_other_cores_are_looked_up_on_each_replay():
    """Of Mamba2, of gated delta nets and of convolutions: what breaks a capture calls them by their names."""
    for layer, name in ((QWEN_NGRAM, "_short_conv"), (SHORT_CONVOLUTION, "short_conv"), (OLMO_GDN, "_full_forward")):
        module, _, owner = layer.path.partition(":")
        attribute = name if layer is SHORT_CONVOLUTION else f"{owner}.{name}"
        (definition,) = module_source.definitions(module, attribute)
        assert f"self.{layer.core}(" in definition.source, layer


GROUP = 1  # a cache group with one layer


def planned(monkeypatch, step: Step | None) -> SimpleNamespace:
    """Metadata of a step with two prompts, of 4 and 3 tokens, whose states run in the blocks 5 and 6."""
    monkeypatch.setattr(RUNNING, "step", step)
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
    step = Step({"b": [Write(3, {GROUP: 9})]}, {"layers.0": GROUP}, ["a", "b"])
    (segment,) = getattr(planned(monkeypatch, step), SEGMENTS)
    assert segment.tokens == slice(None)
    blocks = torch.arange(20).reshape(10, 2)
    segment.keep_states([blocks])
    assert blocks[9].tolist() == blocks[6].tolist() == [12, 13]


@pytest.mark.parametrize("step", [None, Step({}, {"layers.0": GROUP}, ["a", "b"])])
def test_a_step_without_writes_runs_in_one(monkeypatch, step):
    assert not hasattr(planned(monkeypatch, step), SEGMENTS)


@dataclass
class Metadata:
    """What a recurrent backend makes of a step in which nobody decodes."""

    seq_lens: list[int]
    state_indices_tensor_p: torch.Tensor
    state_indices_tensor_d: torch.Tensor | None = None
    num_decodes: int = 0

    @classmethod
    def of(cls, common: CommonAttentionMetadata) -> "Metadata":
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


@pytest.mark.parametrize(
    ("row", "offset", "tokens", "seq_lens", "rows"),
    [
        ("a", 2, [[0, 1, 4, 5, 6], [2, 3]], [[2, 3], [4]], [[0, 1], [0]]),
        ("b", 1, [[0, 1, 2, 3, 4], [5, 6]], [[4, 1], [3]], [[0, 1], [1]]),
        ("b", 3, [[0, 1, 2, 3, 4, 5, 6]], [[4, 3]], [[0, 1]]),
    ],
)
def test_each_cache_group_runs_the_same_segments_on_blocks_of_its_own(monkeypatch, row, offset, tokens, seq_lens, rows):
    step = Step({row: [Write(offset, {0: 8, 1: 18})]}, LAYERS, ["a", "b"])
    monkeypatch.setattr(RUNNING, "step", step)
    build = segments.plan_segments(lambda self, _, common: Metadata.of(common))
    first = build(SimpleNamespace(layer_names=["layers.0"]), 0, PROMPTS)
    update = segments.plan_segments_of_group(
        lambda self, made, table: replace(made, state_indices_tensor_p=table[:, 0])
    )
    second = update(SimpleNamespace(layer_names=["layers.1"]), first, torch.tensor([[15], [16]]))
    third = update(SimpleNamespace(layer_names=["layers.0"]), second, torch.tensor([[5], [6]]))
    for metadata, blocks, target in ((first, (5, 6), 8), (second, (15, 16), 18), (third, (5, 6), 8)):
        made = getattr(metadata, SEGMENTS)
        assert [torch.arange(7)[segment.tokens].tolist() for segment in made] == tokens
        assert [segment.metadata.seq_lens for segment in made] == seq_lens
        running = [segment.metadata.state_indices_tensor_p.tolist() for segment in made]
        assert running == [[blocks[each] for each in ran] for ran in rows]
        assert made[0].targets.tolist() == [target] and made[0].sources.tolist() == [blocks["ab".index(row)]]
        assert all(segment.targets is None for segment in made[1:])


def test_tokens_that_follow_each_other_are_read_without_a_copy(monkeypatch):
    step = Step({"b": [Write(1, {0: 8})]}, LAYERS, ["a", "b"])
    monkeypatch.setattr(RUNNING, "step", step)
    build = segments.plan_segments(lambda self, _, common: Metadata.of(common))
    made = getattr(build(SimpleNamespace(layer_names=["layers.0"]), 0, PROMPTS), SEGMENTS)
    assert [segment.tokens for segment in made] == [slice(0, 5), slice(5, 7)]


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
    function = getattr(module, op)
    assert calls in inspect.getsource(function)
    before = inspect.getsource(module).split(f"def {op}(")[0].rstrip()
    assert before.endswith("@eager_break_during_capture")


def test_every_prefill_kernel_of_a_delta_net_goes_on_from_a_state_and_gives_one_back():
    """vLLM's own choice among Triton, FlashInfer, CuteDSL and AITER: a segment needs no more of it than that."""
    kernels = {
        name: each
        for name, each in vars(qwen_gdn_linear_attn.ChunkGatedDeltaRule).items()
        if name.startswith("forward_")
    }
    assert {"forward_cuda", "forward_native", "forward_cutedsl"} <= kernels.keys()
    for name, kernel in kernels.items():
        assert {"initial_state", "output_final_state", "cu_seqlens"} <= inspect.signature(kernel).parameters.keys(), (
            name
        )
        assert "initial_state=initial_state" in inspect.getsource(kernel), name
    layer = qwen_gdn_linear_attn.QwenGatedDeltaNetAttention
    tree = ast.parse(textwrap.dedent(inspect.getsource(layer)))
    calls = {
        method.name: [
            call
            for call in ast.walk(method)
            if isinstance(call, ast.Call) and ast.unparse(call.func) == "self.chunk_gated_delta_rule"
        ]
        for method in ast.walk(tree)
        if isinstance(method, ast.FunctionDef)
    }
    # The warm-up has no state; the core is the one way of prompts to a kernel, and it is the one that is patched.
    assert {name for name, found in calls.items() if found} == {"_warmup_prefill_kernels", "_forward_core"}
    (call,) = calls["_forward_core"]
    given = {each.arg: ast.unparse(each.value) for each in call.keywords}
    assert (given["initial_state"], given["output_final_state"]) == ("initial_state", "True")
    # Chunks are the segment's own: of the metadata that vLLM's builder makes for it.
    assert given["cu_seqlens"].startswith("attn_metadata.") and given["chunk_indices"].startswith("attn_metadata.")
