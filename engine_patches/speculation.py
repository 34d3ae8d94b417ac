"""Hints beside speculative decoding: with which drafts they are given, and what a hit then takes.

A draft head's own row for token p is made of the target's hidden state of p and of token p + 1. So vLLM lets a request
resume only where it also shares what comes next, or the head would draft worse, though no answer could change. vLLM
0.32 matches one unit more than it uses and takes it off again (the "drop", `SpeculativeConfig.use_eagle_block_drop`);
from 0.33 on a unit's hash covers the next token, too. n-gram drafts have no rows of their own, and ask for nothing.

Two lengths carry all of it, in tokens: `drop`, how far past a state the keys of attention rows have to reach, and
`ahead`, how far past it a prefix has to be shared. Both are 0 without drafts.
"""

from __future__ import annotations

from typing import Any

from engine_patches import settings

# vLLM's names of the methods beside which hints are given. All but `eagle` have been shown on engines; its heads ask of
# the scheduler what those of `eagle3` do.
METHODS = ("mtp", "ngram", "eagle", "eagle3", "dflash", "dspark")


def switched_off(vllm_config: Any) -> str | None:
    """What to do if nothing but the switch keeps hints from being used beside drafts; None if it does not."""
    if not drafting(vllm_config) or settings.drafts() != settings.NEVER:
        return None
    return (
        f"speculative decoding is on ({vllm_config.speculative_config.method}) and {settings.DRAFTS}={settings.NEVER}; "
        f"{settings.AUTO} uses hints beside it after a trial"
    )


def unsupported(vllm_config: Any) -> str | None:
    """Why hints do not go together with the drafts of this configuration, whatever the switch; None if they do."""
    if not drafting(vllm_config):
        return None
    drafts = vllm_config.speculative_config
    method = str(drafts.method)
    if method not in METHODS:
        return f"hints beside drafts of the method {method} are not known to be right; {', '.join(METHODS)} are"
    if drafts.use_multi_module_mtp():
        return "a draft head of several modules leaves its last rows unfinished; num_speculative_tokens 1 uses one"
    if getattr(drafts, "num_speculative_tokens_per_batch_size", None) is not None:
        return "the number of drafts follows the batch's size; leave num_speculative_tokens_per_batch_size away"
    if getattr(drafts, "enable_adaptive_verification", False):
        return "the number of drafts follows their confidence; leave enable_adaptive_verification away"
    if vllm_config.parallel_config.pipeline_parallel_size > 1:
        return "drafts with pipeline parallelism; use tensor parallelism, or no drafts"
    if vllm_config.kv_transfer_config is not None:
        return "drafts with a KV connector; leave one of the two away"
    if vllm_config.scheduler_config.async_scheduling and not vllm_config.use_v2_model_runner:
        # Counts of accepted drafts arrive in the order of the last step's rows, and are permuted twice.
        return "model runner V1 mixes up counts of accepted drafts (vllm#53919); add --no-async-scheduling"
    return None


def drafting(vllm_config: Any) -> bool:
    return vllm_config.speculative_config is not None and bool(vllm_config.num_speculative_tokens)


def drops(vllm_config: Any) -> bool:
    """Whether vLLM takes a unit off each match of a prefix, for the drafts of this configuration."""
    drafts = vllm_config.speculative_config
    if drafts is None or _lookahead(vllm_config):
        return False
    return bool(drafts.use_eagle_block_drop())


def ahead(vllm_config: Any, unit: int) -> int:
    """Tokens past a state that a prefix has to share, before the engine has said so itself; `unit`: of its matches."""
    if vllm_config.speculative_config is None or unsupported(vllm_config) or switched_off(vllm_config):
        return 0
    return unit if drops(vllm_config) else _lookahead(vllm_config)


def _lookahead(vllm_config: Any) -> int:
    """Tokens past a block's end that its key covers, where vLLM (0.33) takes no unit off a match; 0 where it does."""
    return int(getattr(vllm_config, "num_hash_lookahead_tokens", 0) or 0)
