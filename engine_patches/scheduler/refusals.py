"""Why a worker uses no hints: of several causes the one that goes last, in words for a user.

What lies in the model or the cache comes before what a connector or drafts bring, and a switch comes last: nobody is to
load a large model again for a second refusal. An attention-only model is not refused; it has no states to keep.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from engine_patches import families, kv_connectors, settings, speculation
from engine_patches.forward.layers import is_promised
from engine_patches.kv_connectors import ConnectorLane

LONGEST = 200  # characters of a cause, which is a label of a metric

# Of `hints.IGNORED_REASONS`.
NO_STATES, CONNECTOR, SPECULATIVE = "no_states", "connector", "speculative"


class GroupRole(enum.Enum):
    """What a lookup asks a cache group for."""

    STATES = enum.auto()  # a state at the position
    ATTENTION = enum.auto()  # all rows before it
    WINDOW = enum.auto()  # the last rows before it, which vLLM finds by whole blocks
    SCRATCH = enum.auto()  # nothing: its blocks are each request's own, and have no keys
    NOT_KNOWN = enum.auto()  # hints are not known to be right beside it


# Managers derive from each other for other reasons than what they are to a hit: a ring of raw keys is a
# `FullAttentionManager` in Python, and each request's own scratch to a prefix cache. So each class is named here, and
# one that is not is refused.
MANAGERS = {
    "MambaManager": GroupRole.STATES,
    "FullAttentionManager": GroupRole.ATTENTION,
    "SinkFullAttentionManager": GroupRole.ATTENTION,  # sinks are no rows of a prompt
    "SlidingWindowManager": GroupRole.WINDOW,
    "ChunkedLocalAttentionManager": GroupRole.WINDOW,
    "CircularBufferManager": GroupRole.SCRATCH,  # raw keys that an index has not compressed yet
    "KpoolTailManager": GroupRole.SCRATCH,  # the same in vLLM 0.31
    "RSWAManager": GroupRole.NOT_KNOWN,  # frees rows of an answer that the next turn has before it
    "CrossAttentionManager": GroupRole.NOT_KNOWN,  # rows of an encoder's input
    # Pages that move between the GPU and its host.
    "HiSparseSourceManager": GroupRole.NOT_KNOWN,
    "HiSparseHotManager": GroupRole.NOT_KNOWN,
    "HiSparseResidentManager": GroupRole.NOT_KNOWN,
}


def role_of(manager: Any) -> GroupRole:
    role = MANAGERS.get(type(manager).__name__, GroupRole.NOT_KNOWN)
    if role is not GroupRole.NOT_KNOWN and not manager.kv_cache_spec.prefix_cacheable:
        return GroupRole.SCRATCH
    return role


def compression(groups: Iterable[Any], vllm_config: Any) -> list[int]:
    """Tokens that each index of `groups` (vLLM's `KVCacheGroupSpec`s) keeps one key for, where that is more than one.

    A prefix that ends elsewhere would leave a key half made, so vLLM matches multiples of these. Of a group with
    several kinds of layers the scheduler knows one alone; the model's configuration tells what an index it has.
    """
    of_groups = [group.kv_cache_spec for group in groups]
    specs = [each for spec in of_groups for each in (getattr(spec, "kv_cache_specs", None) or {"": spec}).values()]
    tokens = {getattr(spec, "tokens_per_state", 1) for spec in specs if spec.prefix_cacheable}
    tokens.add(families.compression_in(vllm_config.model_config.hf_text_config))
    return sorted(each for each in tokens if isinstance(each, int) and each > 1)


class Refusal(NamedTuple):
    """Why the hints of all requests are ignored."""

    reason: str  # under which each is counted
    cause: str  # one sentence with the cure, if there is one, and no full stop; at most `LONGEST` characters


def refused(reason: str, cause: str) -> Refusal:
    """With a cause that is cut where it is too long: some name what vLLM or a user calls something."""
    return Refusal(reason, cause if len(cause) <= LONGEST else cause[: LONGEST - 1] + "…")


def by_configuration(vllm_config: Any, *, in_pass: bool = True) -> Refusal | None:
    """What a configuration tells; None without recurrent layers, too. `in_pass`: they write states inside a pass."""
    model = vllm_config.model_config
    return _last(vllm_config, None, in_pass) if model.is_hybrid or model.is_attention_free else None


def by_scheduler(scheduler: Any, recurrent: Sequence[Any]) -> Refusal | None:
    """Why a vLLM `Scheduler` refuses hints; None if it does not. `recurrent`: its managers of recurrent layers."""
    groups = scheduler.kv_cache_manager.kv_cache_config.kv_cache_groups
    in_pass = all(is_promised(groups[manager.kv_cache_group_id].kv_cache_spec) for manager in recurrent)
    return _last(scheduler.vllm_config, scheduler, in_pass)


def finds_whole_blocks(scheduler: Any) -> bool:
    """Whether states are found at the ends of cache blocks alone, since those are as long as the match unit."""
    return bool(scheduler.hash_block_size == scheduler.block_size)


def _last(vllm_config: Any, scheduler: Any, in_pass: bool) -> Refusal | None:
    """The cause that goes last; all that flags or a switch cure go together. `scheduler`: None before there is one."""
    structural = next(_of_structure(vllm_config, scheduler, in_pass), None)
    if structural is not None:
        return structural
    curable = list(_of_flags(vllm_config, scheduler))
    return refused(curable[0].reason, "; ".join(each.cause for each in curable)) if curable else None


def _of_structure(vllm_config: Any, scheduler: Any, in_pass: bool) -> Iterator[Refusal]:
    """What the model, a connector or the kind of drafts has to change for."""
    drafting = speculation.drafting(vllm_config)
    if scheduler is not None:
        coordinator = scheduler.kv_cache_manager.coordinator
        managers = coordinator.single_type_managers
        if unknown := sorted({type(each).__name__ for each in managers if role_of(each) is GroupRole.NOT_KNOWN}):
            kept_by = f"vLLM keeps a cache of this model by {', '.join(unknown)}"
            yield refused(NO_STATES, f"{kept_by}, beside which hints are not known to be right")
        cacheable = [each for each in managers if each.kv_cache_spec.prefix_cacheable]
        is_fine = all(each.supports_fine_grained_hash_lookup for each in cacheable)
        if not is_fine and not scheduler.mamba_partial_cache_hit:
            reason, whose = (SPECULATIVE, "the model or its draft head") if drafting else (NO_STATES, "the model")
            yield refused(
                reason, f"vLLM finds no prefix between cache blocks, since a layer of {whose} has a sliding window"
            )
        if coordinator.num_reprefillable_tokens:
            yield refused(SPECULATIVE, "the draft head leaves its last rows unfinished")
    connector = kv_connectors.decide(vllm_config)
    if connector.lane is ConnectorLane.NO_HINTS:
        yield refused(CONNECTOR, connector.reason)
    elif connector.names and vllm_config.parallel_config.decode_context_parallel_size > 1:
        # An attention block then spans several blocks of states, and what a connector loads ends at one kind of edge.
        yield refused(CONNECTOR, "with decode context parallelism, hints are not used beside a KV connector")
    if (unsupported := speculation.unsupported(vllm_config)) is not None:
        yield refused(SPECULATIVE, unsupported)
    if drafting and not in_pass:
        cause = "beside drafts, states have to be written inside a pass, which this model's layers are not known to do"
        yield refused(SPECULATIVE, cause)


def _of_flags(vllm_config: Any, scheduler: Any) -> Iterator[Refusal]:
    cache = vllm_config.cache_config
    if not cache.enable_prefix_caching:
        yield refused(NO_STATES, "prefix caching is off (--enable-prefix-caching)")
    elif cache.mamba_cache_mode != "align":
        yield refused(NO_STATES, f"--mamba-cache-mode {cache.mamba_cache_mode} keeps no states at hints, align does")
    elif scheduler is not None and not scheduler.mamba_partial_cache_hit:
        yield from _of_match_unit(scheduler)
    elif scheduler is not None:  # vLLM refuses such a match unit, too, except at the ends of whole blocks
        unit, groups = scheduler.hash_block_size, scheduler.kv_cache_manager.kv_cache_config.kv_cache_groups
        for tokens in (each for each in compression(groups, vllm_config) if unit % each):
            why = f"is no multiple of the {tokens} that this model's index keeps one key for (--prefix-match-unit)"
            yield refused(NO_STATES, f"the match unit, {unit} tokens, {why}")
    parallel, compilation = vllm_config.parallel_config, vllm_config.compilation_config
    if parallel.distributed_executor_backend == "external_launcher" and parallel.world_size > 1:
        yield refused(
            NO_STATES,
            "each rank has a scheduler of its own, whose clocks would decide differently "
            "(--distributed-executor-backend external_launcher; mp has one)",
        )
    if getattr(compilation.cudagraph_mode, "name", "") == "FULL" and not compilation.splitting_ops_contain_attention():
        yield refused(
            NO_STATES,
            "a prompt may be replayed as one graph, which writes no states "
            '(--compilation-config {"cudagraph_mode": "FULL_AND_PIECEWISE"})',
        )
    if (switched_off := speculation.switched_off(vllm_config)) is not None:
        yield refused(SPECULATIVE, switched_off)
    on_trial = speculation.drafting(vllm_config) and settings.drafts() == settings.AUTO
    if on_trial and 0 <= vllm_config.model_config.max_logprobs < 3:  # which tell no right answer from a wrong one
        yield refused(SPECULATIVE, "vLLM gives fewer than 3 logprobs (--max-logprobs)")


def _of_match_unit(scheduler: Any) -> Iterator[Refusal]:
    """What is refused where vLLM finds no prefix inside a cache block: states of whole blocks were shown to be right
    alone, and not beside what else reads and writes the cache."""
    drafting = speculation.drafting(scheduler.vllm_config)
    if not finds_whole_blocks(scheduler):
        yield refused(NO_STATES, "vLLM finds no prefix between this model's cache blocks")
    elif drafting or scheduler.vllm_config.kv_transfer_config is not None:
        yield refused(
            SPECULATIVE if drafting else CONNECTOR,
            f"the match unit is a whole cache block, {scheduler.block_size} tokens, and hints beside "
            f"{'drafts' if drafting else 'a KV connector'} need a smaller one (--prefix-match-unit)",
        )
