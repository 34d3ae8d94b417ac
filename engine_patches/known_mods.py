"""Mods of others that edit functions Seamark patches: where such a function differs, its mod may be why.

By what the mods' own scripts replace. A mod that edits something else, as most do, is of no concern here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

_SCHEDULER = "vllm.v1.core.sched.scheduler:Scheduler"

_MAMBA = "vllm.v1.core.single_type_kv_cache_manager:MambaManager"

_SPLIT, _SET_UP, _TAIL = (
    f"{_SCHEDULER}._mamba_block_aligned_split",
    f"{_SCHEDULER}.__init__",
    f"{_MAMBA}._cache_partial_tail_block",
)

EDITED: Mapping[str, Sequence[str]] = {
    "fix-hybrid-prefix-cache-eagle": (_SPLIT, _SET_UP, _TAIL),
    "fix-eagle-fine-prefix": (_SPLIT, _SET_UP, _TAIL),
    "fix-qwen3-coder-next": (f"{_MAMBA}.cache_blocks",),
    "glm53-port-*": (_SET_UP, f"{_SCHEDULER}.schedule"),
}


def that_edit(target: str) -> Sequence[str]:
    """The names of the mods that edit a function of vLLM, "module:Class.function"."""
    return [mod for mod, targets in EDITED.items() if target in targets]
