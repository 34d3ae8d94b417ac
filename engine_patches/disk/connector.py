"""Our KV connector: vLLM's offloading, with states at any match unit stored when that pays, and found deepest first.

vLLM's own looks only behind the deepest whole block, takes what it has already at once, and stores every prompt's end.
Here a state is stored when a request has come back to it, so that its use is shown, or when it is pinned; and a load
has to save more time than it takes. Blocks that are being stored are held like a request's until they are copied.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import vllm
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import TransferJob
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.config import build_offloading_config
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import (
    OffloadingConnectorScheduler,
    TransferJobStatus,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.worker import OffloadingConnectorWorker
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
from vllm.v1.kv_offload.base import GPULoadStoreSpec, LookupResult
from vllm.v1.kv_offload.factory import OffloadingSpecFactory

from engine_patches.disk.files import ASSUMED_TOKEN_SECONDS, CHECKSUM_NAME
from engine_patches.disk.tier import CheckedFiles
from engine_patches.footprint import DECLINED, LOADED, LOCAL_HIT
from engine_patches.forward.loaded_weights import Weights
from engine_patches.kv_connectors import ALL, USED
from engine_patches.scheduler.cache_keys import HeldKeys, key_at
from engine_patches.scheduler.checkpoints import Checkpoints
from engine_patches.settings import logger

# A request does not wait longer than this for a load to come: it is computed then. Seconds.
PATIENCE = 5.0

_GROUP = slice(-4, None)  # of a key: its cache group


class SeamarkConnector(OffloadingConnector):  # type: ignore[misc]  # vLLM is untyped to mypy
    """One for each scheduler, and one for each of its workers."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        KVConnectorBase_V1.__init__(self, vllm_config, role, kv_cache_config)
        extra = vllm_config.kv_transfer_config.kv_connector_extra_config
        # Rows of host memory: what the longest prompt takes, twice, so that one loads while another is stored.
        block_sizes = [group.kv_cache_spec.block_size for group in kv_cache_config.kv_cache_groups]
        longest = -(-vllm_config.model_config.max_model_len // min(block_sizes))
        extra.setdefault("staging_rows", int(2 * longest + 4 * len(block_sizes)))
        self.connector_scheduler: StateScheduler | None = None
        self.connector_worker = None
        if role == KVConnectorRole.SCHEDULER:
            for tier in extra["secondary_tiers"]:
                tier["identity"] = identity_of(vllm_config, kv_cache_config).hex()
        config = build_offloading_config(vllm_config, kv_cache_config)
        spec = OffloadingSpecFactory.create_spec(config)
        if role == KVConnectorRole.SCHEDULER:
            self.connector_scheduler = StateScheduler(spec, vllm_config, kv_cache_config)
        elif role == KVConnectorRole.WORKER:
            self.connector_worker = OffloadingConnectorWorker(spec, vllm_config, kv_cache_config)

    def seamark_introduce(self, checkpoints: Checkpoints, pool: Any) -> None:
        if self.connector_scheduler is not None:
            self.connector_scheduler.introduce(checkpoints, pool)


class _Offer(NamedTuple):
    """What is to be stored. Blocks are held until they are."""

    request_id: str
    blocks: dict[bytes, Any]  # vLLM's KVCacheBlock by key, in the order of their cache groups
    rows: list[bytes]  # keys that are in host memory still, and not on disk: they were lost there, or never came


class StateScheduler(OffloadingConnectorScheduler):  # type: ignore[misc]
    """The scheduler's half. Lengths in tokens."""

    manager: Any
    _held_keys: HeldKeys  # from `introduce` on

    def __init__(self, spec: Any, vllm_config: Any, kv_cache_config: Any) -> None:
        super().__init__(spec, vllm_config, kv_cache_config)
        self._tier: CheckedFiles = self.manager.secondary_tiers[0]
        self._keep_all = spec.extra_config.get("keep", USED) == ALL
        self._groups = {config.group_idx: config for config in self.config.kv_group_configs}
        self._checkpoints: Checkpoints | None = None
        self._pool: Any = None
        self._offers: list[_Offer] = []
        self._stored_from: dict[int, list[Any]] = {}  # blocks held, by job
        # Request -> position whose load is waited for (0: it came to nothing, and another is looked for), since when.
        self._promised: dict[str, tuple[int, float]] = {}
        self._gave_up: set[str] = set()  # requests that a load has not come for in time

    def introduce(self, checkpoints: Checkpoints, pool: Any) -> None:
        """From now on states are stored and found. Without this call the connector does nothing."""
        states = checkpoints.states
        if states is None or not states.in_pass or states.keys.groups != self._groups.keys():
            logger.warning("seamark: no states are kept on disk: this model's are not written inside a pass")
            return
        if not checkpoints.weights.name:
            logger.warning("seamark: no states are kept on disk: %s", checkpoints.weights.unknown)
            return
        self._checkpoints, self._pool = checkpoints, pool
        self._held_keys, states.store = states.keys, self
        self._tier.keys_in_use = lambda: states.pins.keys

    # What `Checkpoints` says.

    def offer(self, request: Any, position: int, used: bool = True) -> None:
        """The request's state at `position` is in the cache; `used`: a request came back to it, or it is pinned."""
        checkpoints = self._checkpoints
        if checkpoints is None or not (used or self._keep_all):
            return
        if not self._tier.takes_stores or not _is_plain(request):
            return
        cached = self._pool.cached_block_hash_to_block
        # Each of them: a file of another group may be gone, or have been refused.
        keys = [key for key in self._held_keys.keys_of(request, position) if not self._is_stored(key)]
        rows = [key for key in keys if self._row(key) is not None]
        missing = sorted((key for key in keys if self._row(key) is None), key=lambda key: key[_GROUP])
        found = {key: cached.get_one_block(key) for key in missing}
        if keys and all(block is not None for block in found.values()):
            self._pool.touch(list(found.values()))
            self._offers.append(_Offer(request.request_id, found, rows))

    def close(self, why: str) -> None:
        """Let go of all blocks, and find nothing any more: states may be of other weights than the identity's."""
        for offer in self._offers:
            self._pool.free_blocks(list(offer.blocks.values()))
        self._offers.clear()
        if self._checkpoints is not None:
            logger.warning("seamark: states on disk are not used until the next start: %s", why)
            self._checkpoints = None

    # What vLLM says.

    def get_num_new_matched_tokens(self, request: Any, *limits: Any, **more: Any) -> Any:
        """vLLM's: how many more tokens than those in the cache can be loaded; None: to be asked again."""
        setattr(request, LOADED, 0)
        return super().get_num_new_matched_tokens(request, *limits, **more)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self._forget(request)
        super().update_state_after_alloc(request, blocks, num_external_tokens)
        setattr(request, LOADED, num_external_tokens)

    def request_finished(self, request: Any) -> Any:
        self._forget(request)
        return super().request_finished(request)

    def _forget(self, request: Any) -> None:
        self._promised.pop(request.request_id, None)
        self._gave_up.discard(request.request_id)

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        meta = super().build_connector_meta(scheduler_output)
        if self._checkpoints is not None:
            refused, num_bytes = self._tier.take_counts()
            self._checkpoints.counters.disk_used(refused, num_bytes, self._tier.bytes_held)
        return meta

    def update_connector_output(self, connector_output: Any) -> None:
        super().update_connector_output(connector_output)
        for job in [job for job in self._stored_from if job not in self._jobs]:
            self._pool.free_blocks(reversed(self._stored_from.pop(job)))

    def _build_store_jobs(self, scheduler_output: Any) -> dict[int, Any]:
        """vLLM would store each full block of each request."""
        return {}

    def _build_partial_tail_store_jobs(self, scheduler_output: Any) -> dict[int, Any]:
        """vLLM would store each prompt's end; these are the states that were offered, one job for each."""
        jobs: dict[int, Any] = {}
        offers, self._offers = self._offers, []
        for offer in offers:
            status = self._req_status.get(offer.request_id)
            rows = [key for key in offer.rows if self._row(key) is not None and not self._is_stored(key)]
            if rows and status is not None:
                self._tier.submit_store(self.manager.create_store_job(rows, status.req_context))
            if not (offer.blocks and status is not None and self._add_store_job(jobs, offer, status)):
                self._pool.free_blocks(reversed(list(offer.blocks.values())))
        return jobs

    def _add_store_job(self, jobs: dict[int, Any], offer: _Offer, status: Any) -> bool:
        """Whether the blocks of an offer are going to be stored, and are held until then."""
        if status.finished_signaled:
            return False
        rows = self.manager.prepare_store(list(offer.blocks), status.req_context)
        if rows is None or not rows.keys_to_store:  # no row is free, or others are storing it
            return False
        keys = list(rows.keys_to_store)
        groups = [int.from_bytes(key[_GROUP], "big") for key in keys]
        job = self._generate_job_id()
        status.transfer_jobs.add(job)
        self._jobs[job] = TransferJobStatus(
            req_id=offer.request_id, pending_count=self.config.num_workers, keys=set(keys), is_store=True
        )
        source = GPULoadStoreSpec(
            [offer.blocks[key].block_id for key in keys],
            group_sizes=[groups.count(group) for group in self._groups],
            block_indices=[0] * len(self._groups),
        )
        jobs[job] = TransferJob(req_id=offer.request_id, src_spec=source, dst_spec=rows.store_spec)
        self._stored_from[job] = list(offer.blocks.values())
        return True

    def _lookup(self, req_status: Any, max_num_new_tokens: int | None = None) -> int | None:
        """Tokens past the local hit's last whole block that can be loaded; None while they come."""
        request, context = req_status.req, req_status.req_context
        req_status.partial_tail_boundary = None
        if self._checkpoints is None or not _is_plain(request) or request.request_id in self._gave_up:
            return 0
        local = req_status.num_locally_computed_tokens
        hit = max(local, getattr(request, LOCAL_HIT, 0))
        end = request.num_prompt_tokens - 1
        if max_num_new_tokens is not None:
            end = min(end, local + max_num_new_tokens)
        position, since = self._promised.pop(request.request_id, (0, time.monotonic()))
        if position and time.monotonic() - since > PATIENCE:
            self._gave_up.add(request.request_id)
            return 0
        for candidate in [position] if position > hit else self._found(request, hit, end):
            keys = list(self._keys(request, local, candidate))
            if not position:
                if not all(map(self._is_held, keys)):
                    continue
                if not self._pays(request, keys, candidate - hit):
                    return 0
            results = {self.manager.lookup(key, context) for key in keys}
            if LookupResult.MISS in results:  # a file was refused, or no row is free
                if not position:
                    return 0
                self._promised[request.request_id] = 0, since
                return self._lookup(req_status, max_num_new_tokens)
            if results != {LookupResult.HIT}:
                self._promised[request.request_id] = candidate, since
                return None
            if candidate % self.config.kv_group_configs[0].tokens_per_block:
                req_status.partial_tail_boundary = candidate
            return int(candidate - local)
        return 0

    def _found(self, request: Any, hit: int, end: int) -> Iterator[int]:
        """Positions past the local hit whose states are held, the deepest first."""
        unit, hashes = self.config.tokens_per_hash, request.block_hashes
        group = self._held_keys.state_key(request, unit)[_GROUP] if hashes else b""
        for units in range(min(end // unit, len(hashes)), hit // unit, -1):
            if self._is_held(hashes[units - 1] + group):
                yield units * unit

    def _keys(self, request: Any, local: int, position: int) -> Iterator[Any]:
        """Keys that have to be loaded for a request to go on at `position`, where blocks up to `local` are there."""
        unit = self.config.tokens_per_hash
        recurrent = self._held_keys.recurrent
        for group, config in self._groups.items():
            if group not in recurrent:
                size = config.tokens_per_block
                for edge in range(local + size, position + 1, size):
                    yield key_at(request, edge, unit, group)
            if group in recurrent or position % config.tokens_per_block:
                yield key_at(request, position, unit, group)

    def _row(self, key: bytes) -> Any:
        return self.manager.primary_tier._policy.get(key)

    def _is_held(self, key: bytes) -> bool:
        """Whether a key's block is in host memory or on disk."""
        return self._row(key) is not None or self._tier.holds(key)

    def _is_stored(self, key: bytes) -> bool:
        """Whether a key's block is on disk, or on its way there."""
        row = self._row(key)
        coming = row is not None and not row.is_ready  # into host memory, and from there to the disk; or from it
        return coming or self._tier.holds(key) or self._tier.is_written(key)

    def _pays(self, request: Any, keys: list[Any], gained: int) -> bool:
        """Whether a load saves more time than it takes; counted once for each request if it does not."""
        assert self._checkpoints is not None  # noqa: S101  # for the type checker
        step_time = self._checkpoints.step_time
        saved = step_time.seconds(gained) if step_time.known else gained * ASSUMED_TOKEN_SECONDS
        if self._tier.cost.pays(len(keys) * self._tier.block_size_bytes, saved):
            return True
        if not getattr(request, DECLINED, False):
            setattr(request, DECLINED, True)
            self._checkpoints.counters.counts.loads_declined += 1
        return False


def _is_plain(request: Any) -> bool:
    """Whether a request's keys say all that its states depend on: of an adapter they say the name alone."""
    return request.lora_request is None and getattr(request, "prompt_embeds", None) is None


def identity_of(vllm_config: Any, kv_cache_config: Any) -> bytes:
    """32 bytes that differ whenever a state written under the one configuration is no use, or wrong, under another.

    Empty if the weights are not known.
    """
    weights = Weights.of(vllm_config)
    if not weights.name:
        return b""
    model, cache, parallel = vllm_config.model_config, vllm_config.cache_config, vllm_config.parallel_config
    split = ("tensor", "pipeline", "decode_context", "prefill_context")
    sizes = [getattr(parallel, f"{kind}_parallel_size") for kind in split]
    facts = {
        "versions": [vllm.__version__, torch.__version__, torch.version.cuda or torch.version.hip or ""],
        "checksum": CHECKSUM_NAME,
        "device": vllm_config.device_config.device_type,
        "attention": [weights.backends, str(vllm_config.attention_config), _instructions(vllm_config)],
        "weights": weights.name,
        "config": {name: value for name, value in model.hf_config.to_dict().items() if name != "_name_or_path"},
        "types": [str(model.dtype), str(model.quantization), str(cache.cache_dtype), str(cache.kv_cache_layout)],
        "states": [str(getattr(cache, f"mamba_{name}", "")) for name in ("cache_dtype", "ssm_cache_dtype")],
        "conv layout": os.environ.get("VLLM_SSM_CONV_STATE_LAYOUT", ""),
        "caches": [[repr(group.kv_cache_spec), group.layer_names] for group in kv_cache_config.kv_cache_groups],
        "hash": str(getattr(cache, "prefix_caching_hash_algo", "")),
        "parallel": [*sizes, bool(parallel.enable_expert_parallel)],
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).digest()


def _instructions(vllm_config: Any) -> str:
    """Those of a CPU for which its kernels lay out blocks; empty for another device."""
    if vllm_config.device_config.device_type != "cpu":
        return ""
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    return str(_get_attn_isa(torch.bfloat16, 32))
