"""What an engine of `seamark gpu-check` finds out about itself and its machine, for the report."""

from __future__ import annotations

import math
import platform
import subprocess
from importlib import metadata
from typing import Any

from engine_patches.gpu_check.engine import LaneEngine
from engine_patches.ledger import patches_live
from engine_patches.scheduler.match_unit import kernel_chunk

PACKAGES = ("vllm-seamark", "transformers", "triton", "flashinfer-python")


def facts_of(engine: LaneEngine) -> dict[str, Any]:
    """Facts of an engine and the machine it runs on; lengths in tokens, pages in bytes."""
    import torch
    import vllm
    from vllm.platforms import current_platform

    layers = engine.config.compilation_config.static_forward_context.values()
    backends = {layer.get_attn_backend().get_name() for layer in layers if hasattr(layer, "get_attn_backend")}
    prefill = {layer.gdn_prefill_backend for layer in layers if hasattr(layer, "gdn_prefill_backend")}
    groups = engine.runner.kv_cache_config.kv_cache_groups
    recurrent = [group.kv_cache_spec for group in groups if hasattr(group.kv_cache_spec, "mamba_type")]
    compilation = engine.config.compilation_config
    cache = engine.config.cache_config
    on_cpu = current_platform.is_cpu()
    checkpoints = engine.checkpoints
    return {
        "packages": {name: version for name in PACKAGES if (version := _version(name)) is not None},
        "python": platform.python_version(),
        "device": "CPU" if on_cpu else torch.cuda.get_device_name(),
        "machine": platform.machine(),
        "capability": None if on_cpu else "sm_{}{}".format(*torch.cuda.get_device_capability()),
        "driver": None if on_cpu else _driver(),
        "cuda": torch.version.cuda,
        "torch": torch.__version__,
        "vllm": vllm.__version__,
        "runner": "V2" if type(engine.runner).__module__.startswith("vllm.v1.worker.gpu.") else "V1",
        "backends": sorted(backends),
        "gdn_prefill": [] if on_cpu else sorted(prefill),  # a CPU has a kernel of its own
        "patches_live": patches_live() and checkpoints is not None,
        "writes_in_forward": checkpoints is not None and checkpoints.writes_in_forward,
        "compiled": str(getattr(compilation.mode, "name", compilation.mode)),
        "graphs": str(getattr(compilation.cudagraph_mode, "name", compilation.cudagraph_mode)),
        "asynchronous": bool(engine.config.scheduler_config.async_scheduling),
        "dtype": str(engine.config.model_config.dtype),
        "kv_dtype": str(cache.cache_dtype),
        "state_dtype": str(getattr(cache, "mamba_ssm_cache_dtype", None)),
        "drafts": engine.config.speculative_config is not None,
        "hints_refused": checkpoints.refusal.cause if checkpoints is not None and checkpoints.refusal else None,
        "ahead": None if checkpoints is None else checkpoints.grid.ahead,
        "windows": engine.has_windows,
        "recurrent": bool(recurrent),
        "longest": engine.config.model_config.max_model_len,
        "budget": engine.budget,
        "block": cache.block_size,
        "match_unit": None if checkpoints is None else checkpoints.grid.unit,
        "alignment": None if checkpoints is None else checkpoints.grid.alignment,
        "chunk": math.lcm(*(kernel_chunk(spec, engine.config) for spec in recurrent)),
        "pages_at_one_address": _pages_at_one_address(engine.runner),
    }


def _pages_at_one_address(runner: Any) -> list[int]:
    """Sizes of the pages of caches that start at one address but differ in them; empty if there are none."""
    pages: dict[int, set[int]] = {}
    for entry in runner.kv_caches:
        for cache in entry if isinstance(entry, list | tuple) else [entry]:
            pages.setdefault(cache.data_ptr(), set()).add(cache.nbytes // runner.kv_cache_config.num_blocks)
    return sorted(max((sizes for sizes in pages.values() if len(sizes) > 1), key=len, default=()))


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _driver() -> str | None:
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return answer.stdout.partition("\n")[0].strip() or None
