"""`seamark worker --checkpoint-dir` as a KV connector of vLLM's. Imports no vLLM: the command asks before it starts."""

from __future__ import annotations

import json

from engine_patches.kv_connectors import OWN, OWN_MODULE

# 32 GiB: some 160 states of the largest hybrids, with the attention rows before them.
DEFAULT_BYTES = 32 << 30

# Which states are stored: those that a request has come back to, and pinned ones; or each, as soon as it is written.
USED, ALL = "used", "all"


def transfer_flags(directory: str, max_bytes: int = DEFAULT_BYTES, keep: str = USED) -> list[str]:
    """Flags of `vllm serve` for checkpoints in `directory`, of at most `max_bytes` bytes."""
    tier = {
        "type": "CheckedFiles",
        "module_path": "engine_patches.disk.tier",
        "root_dir": directory,
        "max_bytes": max_bytes,
    }
    extra = {
        "spec_name": "CheckpointSpec",
        "spec_module_path": "engine_patches.disk.copies",
        "secondary_tiers": [tier],
        "keep": keep,
    }
    transfer = {
        "kv_connector": OWN,
        "kv_connector_module_path": OWN_MODULE,
        "kv_role": "kv_both",
        "kv_connector_extra_config": extra,
    }
    return ["--kv-transfer-config", json.dumps(transfer)]
