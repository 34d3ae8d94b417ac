"""Requests of which nothing is kept: no block of theirs gets a key, and a key is all by which anything finds a block.

vLLM registers a request's keys in one place, which also hands its blocks to KV events and connectors. What Seamark
registers and learns by itself asks `Wish.is_kept`. vLLM takes blocks without a key before all others.
"""

from __future__ import annotations

from typing import Any

from engine_patches import kv_connectors
from engine_patches.kv_connectors import ConnectorLane
from engine_patches.ledger import CORE, KV_CACHE_MANAGER, Function, Patch, Shape
from engine_patches.scheduler import hints

TOLD = "told"  # what an engine says that keeps nothing of such a request; another one says why it cannot promise that


def leave_out(scheduler: Any) -> None:
    """Have a vLLM `Scheduler` register no key of such requests."""
    checkpoints, coordinator = scheduler.seamark, scheduler.kv_cache_manager.coordinator
    register = coordinator.cache_blocks

    def cache_blocks(request: Any, num_computed_tokens: int) -> None:
        if checkpoints.state_of(request).wish.is_kept:
            register(request, num_computed_tokens)

    coordinator.cache_blocks = cache_blocks


def why_not(vllm_config: Any) -> str:
    """Why an engine of this configuration cannot promise it; "" if it can."""
    connector = kv_connectors.decide(vllm_config)
    if connector.names and connector.lane is not ConnectorLane.INSIDE:
        return f"KV connector {', '.join(connector.names)} may store it by itself"
    if getattr(vllm_config, "ec_transfer_config", None) is not None:
        return "an encoder cache connector may store it by itself"
    hisparse = getattr(getattr(vllm_config, "attention_config", None), "hisparse_config", None)
    return "HiSparse stores it by itself" if hisparse is not None else ""


@Patch(
    "not-kept",
    f"{CORE}.preprocess_add_request",
    why="a request that asks for nothing of it to be kept is refused where that cannot be promised",
    until="vLLM takes requests whose blocks get no keys",
    relies_on=(
        # By these alone do a request's blocks get keys.
        Shape(
            "vllm.v1.core.kv_cache_coordinator:KVCacheCoordinator.cache_blocks",
            "self, request, num_computed_tokens",
            ("manager.cache_blocks(",),
        ),
        Shape(f"{KV_CACHE_MANAGER}.allocate_slots", mentions=("self.coordinator.cache_blocks(request, ",)),
        Shape(f"{KV_CACHE_MANAGER}.cache_blocks", mentions=("self.coordinator.cache_blocks(request, ",)),
        Shape(f"{KV_CACHE_MANAGER}.prefix_cache_lookup_enabled", mentions=("request.skip_reading_prefix_cache",)),
    ),
)
def refuse_what_cannot_be(self: Any, request: Any, *, original: Function) -> Any:
    keep = hints.keep_in(request)
    if keep not in hints.KEEPS:
        raise _error(f"{hints.KEEP} is one of {', '.join(filter(None, hints.KEEPS))}")
    if keep in (hints.NO, hints.PRIVATE) and (why := why_not(self.vllm_config)):
        raise _error(f"{hints.KEEP}: {why}; send the request to a worker without it")
    made = original(self, request)
    if keep == hints.PRIVATE:
        made[0].skip_reading_prefix_cache = True
    return made


def _error(words: str) -> Exception:
    from vllm.exceptions import VLLMValidationError

    error: Exception = VLLMValidationError(words, parameter="vllm_xargs")
    return error
