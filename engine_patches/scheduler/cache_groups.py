"""What the cache groups of a model are to a hit, each by the manager that vLLM keeps it with.

Managers derive from each other for other reasons than that: a ring of raw keys is a `FullAttentionManager` in Python,
and each request's own scratch to a prefix cache. So each class is named here, and one that is not is refused.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from typing import Any

from engine_patches import families


class GroupRole(enum.Enum):
    """What a lookup asks a cache group for."""

    STATES = enum.auto()  # a state at the position
    ATTENTION = enum.auto()  # all rows before it
    WINDOW = enum.auto()  # the last rows before it, which vLLM finds by whole blocks
    SCRATCH = enum.auto()  # nothing: its blocks are each request's own, and have no keys
    NOT_KNOWN = enum.auto()  # hints are not known to be right beside it


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
    """Of a cache group, by its vLLM `SingleTypeKVCacheManager`."""
    role = MANAGERS.get(type(manager).__name__, GroupRole.NOT_KNOWN)
    if role is not GroupRole.NOT_KNOWN and not manager.kv_cache_spec.prefix_cacheable:
        return GroupRole.SCRATCH
    return role


def not_known(managers: Iterable[Any]) -> list[str]:
    """Names of the classes among `managers` beside which hints are not known to be right."""
    return sorted({type(each).__name__ for each in managers if role_of(each) is GroupRole.NOT_KNOWN})


def compression(groups: Iterable[Any], vllm_config: Any) -> list[int]:
    """Tokens that each index of `groups` (vLLM's `KVCacheGroupSpec`s) keeps one key for, where that is more than one.

    A prefix that ends elsewhere would leave a key half made, so vLLM matches multiples of these. Of a group with
    several kinds of layers the scheduler knows one alone; the model's configuration tells what an index it has.
    """
    specs = [spec for group in groups for spec in _specs_of(group.kv_cache_spec)]
    tokens = {getattr(spec, "tokens_per_state", 1) for spec in specs if spec.prefix_cacheable}
    tokens.add(families.compression_in(vllm_config.model_config.hf_text_config))
    return sorted(each for each in tokens if isinstance(each, int) and each > 1)


def _specs_of(spec: Any) -> Iterable[Any]:
    """A group's spec, or those of its layers if these differ."""
    of_layers = getattr(spec, "kv_cache_specs", None)
    return [spec] if of_layers is None else of_layers.values()
