"""The lanes of `seamark gpu-check`, as a table: one model in one configuration each, the most valuable first.

Tiny models are configurations alone. Their weights, as those of any `--load-format dummy`, are drawn on the device that
they lie on: vLLM's own filling is too small for an answer to show a damaged state.

And the questions of a lane: prompts around all edges of states and blocks, and how far each may be cached. They are
random token ids, so two share exactly what they are given to share, and no tokenizer has a say.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from engine_patches.commands.model import FAMILIES, SPECIAL_TOKENS, VOCABULARY

NEMOTRON, QWEN, FLASH_NEXT, KIMI_LINEAR = "nemotron_h", "qwen3_next", "qwen4_exp", "kimi_linear"
ARCHITECTURES = {NEMOTRON: "NemotronHForCausalLM", QWEN: "Qwen3NextForCausalLM"}
OF_BOTH = """{"vocab_size": %d, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4,
 "hidden_act": "silu", "rms_norm_eps": 1e-6, "max_position_embeddings": 32768, "torch_dtype": "bfloat16",
 "tie_word_embeddings": false, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
 "num_attention_heads": 4, "head_dim": 64, """

# Of families that transformers cannot make as vLLM loads them. Flash-Next's attention is without the index, whose
# kernels want the sizes of the published model: transformers up to 5.17 and from 5.18 on have a name each for such a
# layer, and both take "full_attention" for it. Between more than one expert rounding alone would send tokens elsewhere.
CONFIGS = {
    FLASH_NEXT: """ "architectures": ["Qwen4ExpForCausalLM"], "model_type": "qwen4_exp_text", "num_key_value_heads": 2,
 "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
 "linear_conv_kernel_dim": 4, "linear_num_key_heads": 1, "linear_num_value_heads": 2, "linear_key_head_dim": 128,
 "linear_value_head_dim": 128, "ple_layer_ids": [1, 4], "ple_embed_dim": 64, "ple_conv_kernel_size": 4, "ngram_size": 3,
 "heads_per_ngram": 2, "ngram_vocab_size_base": 500, "split_ngram_parts": 1, "hc_count": 2, "hc_lowrank": 16,
 "num_experts": 1, "num_experts_per_tok": 1, "moe_intermediate_size": 256, "shared_expert_intermediate_size": 256,
 "mlp_only_layers": [], "decoder_sparse_step": 1, "output_gate_type": "silu",
 "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}}""",
    KIMI_LINEAR: """ "architectures": ["KimiLinearForCausalLM"], "model_type": "kimi_linear", "num_key_value_heads": 4,
 "kv_lora_rank": 512, "q_lora_rank": null, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
 "mla_use_nope": true, "num_experts": null, "first_k_dense_replace": 4,
 "linear_attn_config": {"kda_layers": [1, 2, 4], "full_attn_layers": [3], "num_heads": 2, "head_dim": 128,
                        "short_conv_kernel_size": 4}}""",
}

MTP = '{"method": "mtp", "num_speculative_tokens": 3}'
RUNNER, KERNELS = "model runner", "kernels of prompts"  # of which a lane takes the other one

# Small enough to find room beside a server that is running on the same GPU.
ARGUMENTS: Mapping[str, Any] = {
    **{"skip_tokenizer_init": True, "load_format": "dummy", "mamba_ssm_cache_dtype": "float32", "max_num_seqs": 16},
    **{"max_num_batched_tokens": 8192, "kv_cache_memory_bytes": 1 << 30, "gpu_memory_utilization": 0.03},
}


class Lane(NamedTuple):
    """One model in one configuration, and what is asked beyond exactness and passes."""

    family: str  # of the tiny model; for a user's own, its name
    dtype: str | None = None  # None: as the flags say
    eager: bool = False
    timed: bool = False  # speed beside vLLM alone
    other: str | None = None  # `RUNNER` or `KERNELS`: the one that vLLM did not choose in the family's first lane
    block_copy: bool = False  # ask vLLM alone whether its copy of a partial block loses something here
    drafts: str | None = None  # JSON of vLLM's --speculative-config
    on_cpu: bool = False
    wants_gpu: bool = False  # has no kernels for a CPU, where it is not run
    own_model: bool = False
    flags: Sequence[str] = ()  # of vLLM

    @property
    def name(self) -> str:
        mode = None if self.own_model or self.on_cpu else "eager" if self.eager else "compiled"
        name = " ".join(filter(None, [self.family, self.dtype, mode]))
        if self.other:
            name += f", other {self.other}"
        if self.drafts is not None:
            drafts = json.loads(self.drafts)
            name += f", drafts ({drafts.get('method', '?')}, {drafts.get('num_speculative_tokens', '?')})"
        return name

    def arguments(self, model: Path | str) -> dict[str, Any]:
        arguments: dict[str, Any] = {"model": str(model), "enable_prefix_caching": True}
        if self.drafts is not None:
            arguments["speculative_config"] = json.loads(self.drafts)
        if self.block_copy:
            arguments["prefix_match_unit"] = 16
        if not self.own_model:
            longest = 4096 if self.on_cpu else 8192
            arguments |= {**ARGUMENTS, "max_model_len": longest, "dtype": self.dtype, "enforce_eager": self.eager}
        return arguments


LANES = {
    "cuda": (
        # As users run them: half precision, compiled, with CUDA graphs, model runner and kernels by vLLM's own choice.
        Lane(NEMOTRON, "bfloat16", timed=True),
        Lane(QWEN, "bfloat16", timed=True),
        Lane(QWEN, "bfloat16", timed=True, other=KERNELS),
        Lane(NEMOTRON, "bfloat16", other=RUNNER),
        Lane(NEMOTRON, "bfloat16", eager=True, block_copy=True),
        # Embeddings of n-grams on the GPU.
        Lane(FLASH_NEXT, "bfloat16", flags=("--engram-config", '{"cpu_offload": false}')),
        Lane(KIMI_LINEAR, "bfloat16"),
    ),
    "cpu": (
        Lane(NEMOTRON, "float32", eager=True, timed=True, on_cpu=True),
        Lane(QWEN, "bfloat16", eager=True, on_cpu=True),
        Lane(FLASH_NEXT, on_cpu=True, wants_gpu=True),
        Lane(KIMI_LINEAR, on_cpu=True, wants_gpu=True),
    ),
}


def lanes_of(device: str, flags: Sequence[str] = ()) -> list[Lane]:
    """The lanes with tiny models on `cpu` or `cuda`, each with these flags of vLLM."""
    return [lane._replace(flags=(*lane.flags, *flags)) for lane in LANES[device]]


# A head forgets with exp(-A * softplus(gate + dt_bias)) a token, gates being drawn around 0: in 150 to 1,500 tokens.
A, DT_BIAS = (0.1, 1.0), -5.0
LOGIT_STD = 3.0  # the best token is clear, and a rounded logprob stays a small one


def write_config(out: Path, family: str) -> Path:
    out.mkdir(parents=True, exist_ok=True)
    if family in ARCHITECTURES:
        config = FAMILIES[family].config()
        config.architectures = [ARCHITECTURES[family]]
        config.save_pretrained(out)
    else:
        (out / "config.json").write_text(OF_BOTH % VOCABULARY + CONFIGS[family] + "\n")
    return out


def draw_weights(model: Any) -> None:
    """Fill a model of vLLM's, the same for each engine, so that its prompts and states can be told apart."""
    import torch

    with torch.no_grad():
        for number, (name, weight) in enumerate(sorted(model.named_parameters())):
            if weight.is_floating_point():
                drawn = weight if weight.element_size() > 1 else weight.bfloat16()
                _draw(name, drawn, torch.Generator(weight.device).manual_seed(number))
                weight.copy_(drawn)


def _draw(name: str, weight: Any, generator: Any) -> None:
    last = name.rpartition(".")[2]
    if last == "A_log":
        weight.uniform_(*A, generator=generator).log_()
    elif last == "A":
        weight.uniform_(*A, generator=generator).neg_()
    elif last == "dt_bias":
        weight.normal_(DT_BIAS, 0.5, generator=generator)
    elif "scale" in last:
        weight.fill_(1.0)
    elif weight.dim() == 1:  # vLLM makes a norm's weights as ones, or as zeros where it adds one itself
        centre = float("norm" in name and bool(weight.float().mean() > 0.5))
        weight.normal_(centre, 0.1, generator=generator)
    else:
        wide = LOGIT_STD if "lm_head" in name else 1.0
        std = 1.0 if "embed" in name else wide * weight.shape[-1] ** -0.5
        weight.normal_(0.0, std, generator=generator)


def draw_in_place_of_loading() -> None:
    """Have vLLM fill models that are started without weights in this way, in this process."""
    from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader

    DummyModelLoader.load_weights = lambda self, model, model_config: draw_weights(model)


SHARED_LENGTHS = (163, 2000, 8000, 32000)  # tokens that prompts for a user's own model, and timed ones, share
NEW_TOKENS = 32  # greedy tokens of every compared answer
NEAR, FAR = 2, 150  # tokens between a state and the answer
OTHER_STATE, EARLY_STATE = "another prefix's state", "a state one unit early"
SPOILED_STATE = "a cold request's own state spoiled by its writes"
DEFECTS = (OTHER_STATE, EARLY_STATE, SPOILED_STATE)

# Sections; every defect has one more. A few questions prove most, so they come first.
FIRST, MORE, RESEND = "first questions", "more questions", "resent prompts"

Geometry = Mapping[str, Any]  # of an engine's cache and passes, in tokens, as in its facts: `LaneEngine.lengths`


class Question(NamedTuple):
    """One prompt, and how far an engine that keeps all states has seen it before."""

    case: str
    tokens: Sequence[int]
    hints: Sequence[int]  # positions, tokens
    known: int | None  # tokens up to which a state was asked for; None if that depends on the order of requests

    def hit(self, facts: Geometry) -> int | None:
        """Tokens that must come from the cache of an engine with these facts."""
        if self.known is None:
            return None
        ahead, alignment = facts["ahead"], facts["alignment"]
        reach = min(self.known - ahead, len(self.tokens) - max(ahead, 1))  # the last token is always computed
        return int(max(reach, 0) // alignment * alignment)


QuestionWave = list[Question]  # asked at once; waves follow each other
Sections = dict[str, list[QuestionWave]]

TINY_IDS = range(len(SPECIAL_TOKENS), VOCABULARY)  # the token ids that prompts are drawn from


class Prompts:
    """Draws prompts: the same seed and ids, the same prompts."""

    def __init__(self, seed: int, ids: range = TINY_IDS) -> None:
        self._draw, self._ids = random.Random(seed), ids
        self.between = self._draw.randint

    def tokens(self, count: int) -> list[int]:
        return self._draw.choices(self._ids, k=count)


def sections(lengths: Geometry, few: bool) -> Sections:
    """All questions, the most valuable first; the last wave of a defect's section is the one to be asked with it."""
    prompts, unit, block = Prompts(0), lengths["alignment"], lengths["block"]
    edges = _edges(prompts, (block - 1, block, block + 1), (block,))
    asked = {FIRST: [*edges, *_several_boundaries(prompts, lengths), *_burst(prompts, lengths, 3)]}
    asked |= _with_defects(prompts, lengths) | {RESEND: _resend(prompts, lengths)}
    if few:
        return asked
    shared = [unit - 1, unit, unit + 1, 5 * unit + 3, block + 5 * unit + 7]
    shared += [2 * block - 1, 2 * block, 2 * block + 1, lengths["budget"] + unit + 3]
    bursts = [wave for _ in range(2) for wave in _burst(prompts, lengths, 6)]
    return asked | {MORE: [*_edges(prompts, shared, (block - 1, block + 1)), *bursts]}


def length_section(shared: int) -> str:
    return f"{shared:,} shared tokens"


def own_sections(lengths: Geometry, shared_lengths: Sequence[int], ids: range, defects: bool = True) -> Sections:
    """Questions for a user's own model: the shortest shared length, the planted defects, the other lengths."""
    prompts = Prompts(0, ids)
    first, *others = ({length_section(shared): _shared(prompts, shared, 29, 3)} for shared in sorted(shared_lengths))
    for each in ([_with_defects(prompts, lengths)] if defects else []) + others:
        first |= each
    return first


def _shared(prompts: Prompts, shared: int, *ends: int) -> list[QuestionWave]:
    """A cold prompt, warm ones that share a prefix with it and go on for `ends` tokens, and the first of them again."""
    prefix = prompts.tokens(shared)
    warm = [[*prefix, *prompts.tokens(end)] for end in ends]
    return [
        [Question(f"cold, {shared} shared", [*prefix, *prompts.tokens(37)], [shared], 0)],
        [Question(f"warm, {shared} shared", whole, [shared, len(whole) - 1], shared) for whole in warm],
        [Question(f"resent, {len(warm[0])} tokens", warm[0], [shared], len(warm[0]) - 1)],
    ]


def _edges(prompts: Prompts, shared_lengths: Sequence[int], ends: Sequence[int]) -> list[QuestionWave]:
    """Cold, warm and resent prompts around the edges of units, blocks and passes."""
    waves = [_shared(prompts, shared, prompts.between(1, 4), FAR) for shared in shared_lengths]
    for length in ends:
        whole = prompts.tokens(length)
        resent = Question(f"resent, ends after {length}", whole, [length - 1, length], length)
        longer = Question(f"goes on after {length}", [*whole, *prompts.tokens(2)], [length], length)
        waves.append([[resent._replace(case=f"cold, ends after {length}", known=0)], [], [resent, longer]])
    return [[question for wave in together for question in wave] for together in zip(*waves, strict=True)]


def _several_boundaries(prompts: Prompts, lengths: Geometry) -> list[QuestionWave]:
    """One request leaves four states; four others, sharing more and more, find one each."""
    unit, block = lengths["alignment"], lengths["block"]
    whole = prompts.tokens(2 * block + unit + 7)
    hints = [2 * unit + 3, block - unit, block + unit + 5, 2 * block]
    found = []
    for shared in (2 * unit + 9, block + 3, block + 2 * unit + 1, 2 * block + 5):
        last = max(hint for hint in hints if hint <= shared)
        found.append(Question(f"one of four, {shared} shared", [*whole[:shared], *prompts.tokens(2)], [], last))
    return [[Question("four boundaries", whole, hints, 0)], found]


def _burst(prompts: Prompts, lengths: Geometry, size: int) -> list[QuestionWave]:
    """Prompts of all lengths at once, three times: cold, resent, and others with the same beginning."""
    shared = prompts.between(lengths["alignment"], 2 * lengths["block"])
    prefix = prompts.tokens(shared)
    first, second = (
        [[*prefix, *prompts.tokens(prompts.between(1, longest))] for _ in range(size)]
        for longest in (lengths["block"], 8)
    )
    return [
        [Question(f"burst, cold, {shared} shared", whole, [shared, len(whole) - 1], None) for whole in first],
        [Question(f"burst, resent, {len(whole)} tokens", whole, [shared], len(whole) - 1) for whole in first],
        [Question(f"burst, warm, {shared} shared", whole, [shared], shared) for whole in second],
    ]


def _resend(prompts: Prompts, lengths: Geometry) -> list[QuestionWave]:
    """Identical prompts that end inside their first block: vLLM alone, blind to hints, resumes there too."""
    drawn = [prompts.tokens(lengths["block"] * tenths // 10 + 5) for tenths in (3, 5, 7, 9)]
    cold = [Question(f"{len(p)} tokens", p, [len(p) - 1], 0) for p in drawn]
    return [cold, [question._replace(known=len(question.tokens) - 1) for question in cold]]


def _with_defects(prompts: Prompts, lengths: Geometry) -> Sections:
    """Requests that resume from a state with a neighbour one unit earlier, and cold ones that write states."""
    shared = max(8 * lengths["alignment"], 160) // lengths["alignment"] * lengths["alignment"]
    asked: Sections = {}
    for defect in DEFECTS:
        prefixes, hints = [prompts.tokens(shared) for _ in range(2)], [shared - lengths["alignment"], shared]
        far = [Question(f"{FAR} tokens on", [*each, *prompts.tokens(FAR)], [shared], shared) for each in prefixes]
        if defect == SPOILED_STATE:
            asked[defect] = [[question._replace(known=0) for question in far]]
            continue
        near = [Question(f"{NEAR} tokens on", [*each, *prompts.tokens(NEAR)], [shared], shared) for each in prefixes]
        asked[defect] = [[Question("cold", [*each, *prompts.tokens(NEAR)], hints, 0) for each in prefixes], near + far]
    return asked
