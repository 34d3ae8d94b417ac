"""Why a worker uses no hints: of several causes the one that goes last, in words for a user.

What lies in the model or the cache comes before what a connector or drafts bring, and a switch comes last: nobody is to
load a large model again for a second refusal. An attention-only model is not refused; it has no states to keep.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from engine_patches import kv_connectors, speculation
from engine_patches.forward.layers import is_promised
from engine_patches.kv_connectors import Lane

LONGEST = 200  # characters of a cause, which is a label of a metric

# Of `hints.IGNORED_REASONS`.
NO_STATES, CONNECTOR, SPECULATIVE = "no_states", "connector", "speculative"


class Refusal(NamedTuple):
    """Why the hints of all requests are ignored."""

    reason: str  # under which each is counted
    cause: str  # one sentence with the cure, if there is one, and no full stop; at most `LONGEST` characters


def refused(reason: str, cause: str) -> Refusal:
    """With a cause that is cut where it is too long: some name what vLLM or a user calls something."""
    return Refusal(reason, cause if len(cause) <= LONGEST else cause[: LONGEST - 3] + "...")


def by_configuration(vllm_config: Any, *, in_pass: bool = True) -> Refusal | None:
    """What an engine's configuration tells, before it has said so itself; None without recurrent layers, too.

    `in_pass`: the layers can write states inside a pass, as far as is known.
    """
    model = vllm_config.model_config
    return next(_causes(vllm_config, None, in_pass), None) if model.is_hybrid or model.is_attention_free else None


def by_scheduler(scheduler: Any, recurrent: Sequence[Any]) -> Refusal | None:
    """Why a vLLM `Scheduler` refuses hints; None if it does not. `recurrent`: its managers of recurrent layers."""
    groups = scheduler.kv_cache_manager.kv_cache_config.kv_cache_groups
    in_pass = all(is_promised(groups[manager.kv_cache_group_id].kv_cache_spec) for manager in recurrent)
    return next(_causes(scheduler.vllm_config, scheduler, in_pass), None)


def _causes(vllm_config: Any, scheduler: Any, in_pass: bool) -> Iterator[Refusal]:
    """The last cause first. `scheduler`: None before there is one."""
    cache = vllm_config.cache_config
    if not cache.enable_prefix_caching:
        yield refused(NO_STATES, "prefix caching is off; --enable-prefix-caching turns it on")
    elif cache.mamba_cache_mode != "align":
        yield refused(NO_STATES, f"--mamba-cache-mode {cache.mamba_cache_mode} keeps no states at hints; align does")
    if scheduler is not None:
        yield from _of_groups(scheduler)
    connector = kv_connectors.decide(vllm_config)
    if connector.lane is Lane.NO_HINTS:
        yield refused(CONNECTOR, connector.reason)
    if (unsupported := speculation.unsupported(vllm_config)) is not None:
        yield refused(SPECULATIVE, unsupported)
    if not in_pass and speculation.drafting(vllm_config):
        yield refused(
            SPECULATIVE, "beside drafts, states have to be written inside a pass, which this model's layers cannot do"
        )
    if (switched_off := speculation.switched_off(vllm_config)) is not None:
        yield refused(SPECULATIVE, switched_off)


def finds_whole_blocks(scheduler: Any) -> bool:
    """Whether states are found at the ends of cache blocks alone, since those are as long as the match unit."""
    return bool(scheduler.hash_block_size == scheduler.block_size)


def _of_groups(scheduler: Any) -> Iterator[Refusal]:
    """What keeps vLLM from finding states, in the cache groups."""
    config, coordinator = scheduler.vllm_config, scheduler.kv_cache_manager.coordinator
    drafting = speculation.drafting(config)
    in_whole_blocks = [
        manager
        for manager in coordinator.single_type_managers
        if manager.kv_cache_spec.prefix_cacheable and not manager.supports_fine_grained_hash_lookup
    ]
    if coordinator.num_reprefillable_tokens:
        yield refused(SPECULATIVE, "the draft head leaves its last rows unfinished")
    if scheduler.mamba_partial_cache_hit:
        return
    if in_whole_blocks:
        whose = "the model's or its draft head's" if drafting else "of the model"
        yield refused(
            SPECULATIVE if drafting else NO_STATES,
            f"vLLM finds no prefix between cache blocks, since a layer, {whose}, has a sliding window",
        )
    elif not finds_whole_blocks(scheduler):
        yield refused(NO_STATES, "vLLM finds no prefix between this model's cache blocks")
    elif drafting or config.kv_transfer_config is not None:
        beside = "drafts" if drafting else "a KV connector"
        yield refused(
            SPECULATIVE if drafting else CONNECTOR,
            f"the match unit is a whole cache block ({scheduler.block_size} tokens), and hints beside {beside} need a "
            "smaller one (--prefix-match-unit)",
        )
