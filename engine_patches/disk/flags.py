"""`seamark worker --checkpoint-dir` and `--peer-address` as a KV connector of vLLM's.

Imports no vLLM: the command asks before it starts.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from engine_patches.kv_connectors import OWN, OWN_MODULE
from engine_patches.ledger import Shape, ShapeMismatch

# 32 GiB: some 160 states of the largest hybrids, with the attention rows before them.
DEFAULT_BYTES = 32 << 30

# Which states are stored: those that a request has come back to, and pinned ones; or each, as soon as it is written.
USED, ALL = "used", "all"

# Host memory that states for peers are kept in: some 20 of the largest hybrids', with the attention rows before them.
DEFAULT_PEER_BYTES = 4 << 30

NO_NIXL = "states come from peers through NIXL, which is not installed here: pip install nixl"

PEERS, PEERS_MODULE = "PeerStates", "engine_patches.disk.peers"

_P2P = "vllm.v1.kv_offload.tiering.p2p"

# What `peers` relies on: which peer is one, when a transfer is over, and who may write to a row.
_PEERS = (
    Shape(f"{_P2P}.manager:P2PSecondaryTierManager._get_hash_seed", "self", ("get_none_hash_seed()",)),
    Shape(
        f"{_P2P}.manager:P2PSecondaryTierManager._get_or_create_session",
        "self, peer_id",
        ("local_hash_seed=self._get_hash_seed()", "session = self._sessions.get(peer_id)"),
    ),
    Shape(
        f"{_P2P}.manager:P2PSecondaryTierManager._accept_new_peers",
        "self, new_connections",
        ("local_hash_seed=self._get_hash_seed()",),
    ),
    Shape(
        f"{_P2P}.manager:P2PSecondaryTierManager._reap_dead_sessions",
        "self",
        ("session = self._sessions.pop(pid)", "self._failed_req_ids.update(close_result.failed_req_ids)"),
    ),
    Shape(
        f"{_P2P}.manager:P2PSecondaryTierManager.drain_jobs",
        "self",
        ("any(s.has_pending_work for",),
    ),
    Shape(
        f"{_P2P}.session.session:P2PSession._on_connect",
        "self, msg",
        (
            "if msg[ConnectMsg.HASH_SEED] != self._local_hash_seed:",
            "local_fp = self._transport.config_fingerprint",
            "self._conn.mark_dead()",
        ),
    ),
    Shape(f"{_P2P}.session.session:P2PSession.register_lookup", "self, kv_request_id, key"),
    Shape(
        f"{_P2P}.data.base:DataTransport.__init__",
        "self, view, config_fields",
        ("self._config_fingerprint = self._compute_fingerprint(config_fields)",),
    ),
)


class PeerAddress(NamedTuple):
    """Where peers reach a worker."""

    host: str
    port: int

    @classmethod
    def parse(cls, text: str) -> PeerAddress:
        """Of HOST:PORT. Raises `ValueError` for anything else, and for an address that others cannot call."""
        host, colon, port = text.rpartition(":")
        if not (colon and host and port.isascii() and port.isdigit() and 0 < int(port) < 65536):
            raise ValueError(f"{text} is not HOST:PORT")
        if host in ("0.0.0.0", "*", "[::]", "::"):  # noqa: S104  # it is refused
            raise ValueError(f"{host} is no address that peers can call this worker at: name that one")
        return cls(host, int(port))


def transfer_flags(directory: str, max_bytes: int = DEFAULT_BYTES, keep: str = USED) -> list[str]:
    """Flags of `vllm serve` for checkpoints in `directory`, of at most `max_bytes` bytes."""
    tier = {
        "type": "CheckedFiles",
        "module_path": "engine_patches.disk.tier",
        "root_dir": directory,
        "max_bytes": max_bytes,
    }
    return _flags(tier, keep)


def peer_flags(address: PeerAddress, num_bytes: int = DEFAULT_PEER_BYTES) -> list[str]:
    """Flags of `vllm serve` for a worker that peers take states from, at `address`, out of `num_bytes` bytes of memory.

    Each state is stored: the first that comes back to it may come to another worker.
    """
    tier = {"type": PEERS, "module_path": PEERS_MODULE, **address._asdict()}
    return _flags(tier, ALL, host_bytes=num_bytes)


def _flags(tier: dict[str, Any], keep: str, **more: Any) -> list[str]:
    extra = {
        "spec_name": "CheckpointSpec",
        "spec_module_path": "engine_patches.disk.copies",
        "secondary_tiers": [tier],
        "keep": keep,
        **more,
    }
    transfer = {
        "kv_connector": OWN,
        "kv_connector_module_path": OWN_MODULE,
        "kv_role": "kv_both",
        "kv_connector_extra_config": extra,
    }
    return ["--kv-transfer-config", json.dumps(transfer)]


def takes_from_peers(transfer: Mapping[str, Any]) -> bool:
    """Whether the fields of a `KVTransferConfig` are those of `peer_flags`."""
    tiers = (transfer.get("kv_connector_extra_config") or {}).get("secondary_tiers") or ()
    return any(tier.get("module_path") == PEERS_MODULE for tier in tiers)


def no_peers() -> str | None:
    """Why states cannot be taken from peers here, in one sentence; None if they can."""
    try:
        for shape in _PEERS:
            shape.check()
    except ShapeMismatch as error:
        return f"this vLLM's p2p tier is not the one that --peer-address was shown with (0.32): {error}"
    if importlib.util.find_spec("nixl") is None and importlib.util.find_spec("nixl_rocm") is None:
        return NO_NIXL
    return None
