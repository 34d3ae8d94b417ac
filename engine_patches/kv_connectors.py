"""Which of vLLM's KV connectors go together with hints, and how states are written beside them: one table.

States that are written inside a pass lie in blocks that are chosen once a step is planned, so a connector must neither
need to know them nor touch them while they are free. Of vLLM's connectors only NIXL that pulls has been shown to do
neither (`tests.harness.transfer_audit`). Nothing here imports vLLM: `seamark worker` asks before it starts.
"""

from __future__ import annotations

import enum
import json
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from engine_patches import module_source
from engine_patches.ledger import Shape, ShapeMismatch, holds


class ConnectorLane(enum.Enum):
    """How states are kept beside a connector, from the best to the worst."""

    INSIDE = "inside_pass"  # as without one
    CHUNK_ENDS = "chunk_ends"  # a chunk is cut for each state, at a pass each
    NO_HINTS = "no_hints"  # hints are refused
    NOT_SERVED = "not_served"  # vLLM starts no hybrid model with it


# Without `SupportsHMA` vLLM turns its hybrid cache manager off, and then cannot lay the caches out.
LMCACHE_MP = "LMCacheMPConnector"  # vLLM's; LMCache may bring one that vLLM prefers
WITHOUT_HYBRIDS = ("ExampleConnector", "FlexKVConnectorV1", "HF3FSKVConnector", "LMCacheConnectorV1", LMCACHE_MP)

NIXL_THAT_PULLS = ("NixlConnector", "NixlPullConnector")  # one class by two names

# By vLLM's names. Any other is `CHUNK_ENDS`: vLLM hands each state at a chunk's end to it by itself.
CONNECTORS: Mapping[str, ConnectorLane] = {
    **dict.fromkeys(NIXL_THAT_PULLS, ConnectorLane.INSIDE),
    "NixlPushConnector": ConnectorLane.CHUNK_ENDS,
    "DecodeBenchConnector": ConnectorLane.NO_HINTS,
    **dict.fromkeys(WITHOUT_HYBRIDS, ConnectorLane.NOT_SERVED),
}

# They copy by streams of a GPU, and end a CPU's engine with words of their own.
FOR_GPUS = {"OffloadingConnector", "SimpleCPUOffloadConnector"}

# Ours, `engine_patches.disk`: it holds what it reads from, and writes only into blocks of waiting requests.
OWN, OWN_MODULE = "SeamarkConnector", "engine_patches.disk.connector"
MULTI = "MultiConnector"

# Of a directory of ours: 32 GiB hold some 160 states of the largest hybrids, with the attention rows before them.
DEFAULT_BYTES = 32 << 30

# Which states are stored: those that a request has come back to, and pinned ones; or each, as soon as it is written.
USED, ALL = "used", "all"

# LMCache#4247, #4492: states of a hybrid that do not belong to the rows that they were loaded with.
CORRUPT = (
    "where LMCache was made to serve hybrids, answers were corrupt and nothing was logged: "
    "38 of 38 after a restart (LMCache#4492), others behind a shared prefix (LMCache#4247)"
)

UNKNOWN = "is not known to leave alone the blocks that a pass writes states into"

_NIXL = "vllm.distributed.kv_transfer.kv_connector.v1.nixl"
_BASE = f"{_NIXL}.base_scheduler:NixlBaseConnectorScheduler"
_PULL = f"{_NIXL}.pull_scheduler:NixlPullConnectorScheduler"
_WORKER = f"{_NIXL}.pull_worker:NixlPullConnectorWorker"

# What NIXL was shown to be right with: it takes the blocks of whole requests, and vLLM keeps blocks that it may write
# from being handed out before the steps that wrote them last are done.
_SHOWN = (
    Shape(
        f"{_PULL}.update_state_after_alloc",
        "self, request, blocks, num_external_tokens",
        ("blocks.get_unhashed_block_ids_all_groups()", "self.get_exchange_clipped_blocks("),
    ),
    Shape(
        f"{_PULL}.request_finished",
        "self, request, block_ids",
        ("delay_free_blocks = any(", "block_ids = self.get_exchange_clipped_blocks(block_ids)"),
    ),
    Shape(f"{_BASE}.get_exchange_clipped_blocks", mentions=("blocks = clip_ssm_state_blocks(blocks, n_spec_blocks)",)),
)

# What is replaced, so that a prefill which comes from another worker is known to be of its prompt and still there.
PREFILL_END = f"{_BASE}._truncate_request_for_prefill"
LOAD_END = f"{_PULL}.get_num_new_matched_tokens"
SENT = f"{_PULL}.request_finished"
READ = f"{_WORKER}._read_blocks_for_req"

_BACKOFF = ("del request.prompt_token_ids[-backoff:]", "request.num_prompt_tokens -= backoff")

_HANDED_OVER = (
    Shape(PREFILL_END, "self, request", (*_BACKOFF, 'params["_p_side_truncated"] = True')),
    Shape(f"{_BASE}.on_new_request", "self, request", ("self._truncate_request_for_prefill(request)",)),
    Shape(f"{_BASE}._stop_heartbeat", "self, req_id"),
    Shape(
        LOAD_END,
        "self, request, num_computed_tokens",
        ("actual = self._get_remote_prefill_token_count(len(token_ids))", "return count, True"),
    ),
    Shape(
        SENT,
        "self, request, block_ids",
        (
            "self._reqs_need_recv[request.request_id] = (request, [], (), False)",
            "self._reqs_need_send[request.request_id] = (",
            "remote_num_tokens = request.num_computed_tokens",
            "remote_blocks_expiry_time=blocks_expiry_time",
        ),
    ),
    Shape(
        READ,
        "self, req_id, meta",
        (
            "if self._bidirectional_kv_xfer_enabled and self._is_turn2_read_expired(meta):",
            "req_id, None, self._recv_failures, record_failed_transfer=False",
        ),
    ),
    Shape(
        f"{_WORKER}._is_turn2_read_expired",
        "self, meta",
        ("clock_offset = self._engine_clock_offset[meta.remote.engine_id]",),
    ),
)


def hands_over() -> bool:
    """Whether this vLLM's NIXL hands prefills over as the patches of it expect."""
    return all(map(holds, _HANDED_OVER))


class Decision(NamedTuple):
    """What a configuration's connectors mean for hints."""

    lane: ConnectorLane = ConnectorLane.INSIDE
    names: tuple[str, ...] = ()  # of the connectors; of a MultiConnector those inside it
    reason: str = ""  # why the lane is no better: half a sentence that begins with the connector's name


WITHOUT = Decision()


def decide(vllm_config: Any) -> Decision:
    """What the connectors of a `VllmConfig` mean for hints."""
    transfer = vllm_config.kv_transfer_config
    if transfer is None:
        return WITHOUT
    return decide_by(vars(transfer), on_cpu=vllm_config.device_config.device_type == "cpu")


def decide_by(transfer: Mapping[str, Any], on_cpu: bool = True) -> Decision:
    """The same by the fields of a `KVTransferConfig`, as far as they are given. `on_cpu`: the model runs on one."""
    found = [(_lane_of(child, on_cpu), str(child["kv_connector"])) for child in _connectors_in(transfer)]
    order, none = list(ConnectorLane), ((ConnectorLane.INSIDE, ""), "")
    (lane, reason), name = max(found, key=lambda each: order.index(each[0][0]), default=none)
    return Decision(lane, tuple(name for _, name in found), f"{name} {reason}" if reason else "")


def needs_a_gpu(transfer: Mapping[str, Any]) -> str | None:
    """The first connector in the fields of a `KVTransferConfig` that starts on no CPU; None if there is none."""
    for child in _connectors_in(transfer):
        extra = child.get("kv_connector_extra_config") or {}
        own = child.get("kv_connector_module_path") or extra.get("spec_module_path")
        if child["kv_connector"] in FOR_GPUS and not own:
            return str(child["kv_connector"])
    return None


def needs_weights(vllm_config: Any) -> bool:
    """Whether a `VllmConfig` has a connector through which states come that other weights may have computed."""
    return any(name in (OWN, *NIXL_THAT_PULLS) for name in _names_in(vllm_config))


def hands_prefills_over(vllm_config: Any) -> bool:
    """Whether one of its connectors hands prefills to workers that may cut their weights otherwise."""
    return any(name in NIXL_THAT_PULLS for name in _names_in(vllm_config))


def _names_in(vllm_config: Any) -> list[str]:
    transfer = vllm_config.kv_transfer_config
    return [] if transfer is None else [str(child["kv_connector"]) for child in _connectors_in(vars(transfer))]


def _connectors_in(transfer: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """A connector's configuration, or those of the connectors inside a MultiConnector."""
    name = transfer.get("kv_connector")
    if not name:
        return
    children = (transfer.get("kv_connector_extra_config") or {}).get("connectors")
    if name == MULTI and not transfer.get("kv_connector_module_path") and children:
        for child in children:
            yield from _connectors_in(child)
    else:
        yield transfer


def _lane_of(transfer: Mapping[str, Any], on_cpu: bool) -> tuple[ConnectorLane, str]:
    if transfer["kv_connector"] == OWN and transfer.get("kv_connector_module_path") == OWN_MODULE:
        return ConnectorLane.INSIDE, ""
    # A module of one's own may hold a class of any name.
    name = str(transfer["kv_connector"])
    known = None if transfer.get("kv_connector_module_path") else CONNECTORS.get(name)
    corrupt = f"; {CORRUPT}" if name.startswith("LMCache") else ""
    if known is ConnectorLane.NOT_SERVED and not (name == LMCACHE_MP and _lmcache_has_its_own()):
        return known, f"knows caches of one kind only, and vLLM cannot serve hybrid models through it{corrupt}"
    if known is ConnectorLane.NO_HINTS:
        return known, "puts values into the cache that nobody has computed"
    if known is not ConnectorLane.INSIDE:
        return ConnectorLane.CHUNK_ENDS, UNKNOWN + corrupt
    if (transfer.get("kv_connector_extra_config") or {}).get("bidirectional_kv_xfer"):
        return ConnectorLane.CHUNK_ENDS, f"with bidirectional_kv_xfer {UNKNOWN}"
    if transfer.get("kv_buffer_device") == "cpu" and not on_cpu:
        return ConnectorLane.CHUNK_ENDS, f"with a buffer in the host's memory {UNKNOWN}"
    try:
        for shape in (*_SHOWN, *_HANDED_OVER):
            shape.check()
    except ShapeMismatch as error:
        return ConnectorLane.CHUNK_ENDS, f"of this vLLM {UNKNOWN}: {error}"
    return known, ""


def _lmcache_has_its_own() -> bool:
    """Whether LMCache is installed with a connector that vLLM takes in place of its own. What that can do is open."""
    try:
        module_source.definitions("lmcache.integration.vllm.lmcache_mp_connector", LMCACHE_MP)
    except ImportError:
        return False
    return True


def transfer_flags(directory: str, max_bytes: int = DEFAULT_BYTES, keep: str = USED) -> list[str]:
    """Flags of `vllm serve` for our connector, with states in `directory`, of at most `max_bytes` bytes."""
    module = "engine_patches.disk.tier"
    tier = {"type": "CheckedFiles", "module_path": module, "root_dir": directory, "max_bytes": max_bytes}
    extra = {"spec_name": "CheckpointSpec", "spec_module_path": module, "secondary_tiers": [tier], "keep": keep}
    transfer = {"kv_connector": OWN, "kv_connector_module_path": OWN_MODULE, "kv_role": "kv_both"}
    return ["--kv-transfer-config", json.dumps({**transfer, "kv_connector_extra_config": extra})]
