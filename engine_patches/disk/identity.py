"""What a state depends on besides its tokens: two engines share files only if all of it is the same."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from engine_patches.disk.files import CHECKSUM_NAME

# Of each file of weights, its size and so many bytes at both ends: all of it would take minutes at every start. A
# safetensors file begins with the names, types and places of its tensors.
SAMPLE_BYTES = 1 << 20

WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.gguf")


def identity_of(vllm_config: Any, kv_cache_config: Any) -> bytes:
    """32 bytes that differ whenever a state written under the one configuration is no use, or wrong, under another."""
    import torch
    import vllm

    model, cache, parallel = vllm_config.model_config, vllm_config.cache_config, vllm_config.parallel_config
    facts = {
        "versions": [vllm.__version__, torch.__version__, torch.version.cuda or torch.version.hip or ""],
        "checksum": CHECKSUM_NAME,
        "device": vllm_config.device_config.device_type,
        "weights": list(_weights(model.model, getattr(model, "revision", None))),
        "config": _config(model.hf_config),
        "types": [str(model.dtype), str(model.quantization), str(cache.cache_dtype), str(cache.kv_cache_layout)],
        "states": [str(getattr(cache, f"mamba_{name}", "")) for name in ("cache_dtype", "ssm_cache_dtype")],
        "conv layout": os.environ.get("VLLM_SSM_CONV_STATE_LAYOUT", ""),
        "caches": [[repr(group.kv_cache_spec), group.layer_names] for group in kv_cache_config.kv_cache_groups],
        "hash": str(getattr(cache, "prefix_caching_hash_algo", "")),
        "parallel": [
            parallel.tensor_parallel_size,
            parallel.pipeline_parallel_size,
            parallel.decode_context_parallel_size,
            parallel.prefill_context_parallel_size,
            bool(parallel.enable_expert_parallel),
        ],
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).digest()


def _config(hf_config: Any) -> dict[str, Any]:
    return {name: value for name, value in hf_config.to_dict().items() if name != "_name_or_path"}


def _weights(name: str, revision: str | None) -> Iterator[list[str]]:
    """Name, size and sample of each file of weights; the model's name and revision where no files are found."""
    folder = _folder(name, revision)
    files = sorted(path for pattern in WEIGHTS for path in folder.glob(pattern)) if folder is not None else []
    for path in files:
        size = path.stat().st_size
        sample = hashlib.sha256()
        with path.open("rb") as file:
            sample.update(file.read(SAMPLE_BYTES))
            file.seek(max(size - SAMPLE_BYTES, 0))
            sample.update(file.read(SAMPLE_BYTES))
        yield [path.name, str(size), sample.hexdigest()]
    if not files:
        yield [name, str(revision)]


def _folder(name: str, revision: str | None) -> Path | None:
    if Path(name).is_dir():
        return Path(name)
    try:
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(name, revision=revision, local_files_only=True))
    except (OSError, ValueError):
        return None
