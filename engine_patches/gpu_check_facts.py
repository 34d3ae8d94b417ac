"""What a machine and an engine are, for the report of `seamark gpu-check`."""

from __future__ import annotations

import math
import platform
import subprocess
from typing import Any

from engine_patches.gpu_check_defects import alignment_of
from engine_patches.match_unit import kernel_chunk


def facts_of(engine: Any) -> dict[str, Any]:
    """Facts of a `gpu_check_engine.Engine` and the machine it runs on; lengths in tokens, pages in bytes."""
    import torch
    import vllm
    from vllm.platforms import current_platform

    from engine_patches.plugin import patches_live

    layers = engine.config.compilation_config.static_forward_context.values()
    backends = {layer.get_attn_backend().get_name() for layer in layers if hasattr(layer, "get_attn_backend")}
    prefill = {layer.gdn_prefill_backend for layer in layers if hasattr(layer, "gdn_prefill_backend")}
    specs = (group.kv_cache_spec for group in engine.runner.kv_cache_config.kv_cache_groups)
    on_cpu = current_platform.is_cpu()
    checkpoints = engine.checkpoints
    return {
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
        "exporting": bool(getattr(checkpoints, "exporting", False)),
        "block": engine.config.cache_config.block_size,
        "match_unit": getattr(checkpoints, "match_unit", None),
        "alignment": None if checkpoints is None else alignment_of(checkpoints),
        "chunk": math.lcm(*(kernel_chunk(spec, engine.config) for spec in specs if hasattr(spec, "mamba_type"))),
        "pages_at_one_address": _pages_at_one_address(engine.runner),
    }


def _pages_at_one_address(runner: Any) -> list[int]:
    """Sizes of the pages of caches that start at one address, where they differ; empty where none do."""
    pages: dict[int, set[int]] = {}
    for entry in runner.kv_caches:
        for cache in entry if isinstance(entry, list | tuple) else [entry]:
            pages.setdefault(cache.data_ptr(), set()).add(cache.nbytes // runner.kv_cache_config.num_blocks)
    return sorted(max((sizes for sizes in pages.values() if len(sizes) > 1), key=len, default=()))


def _driver() -> str | None:
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return answer.stdout.partition("\n")[0].strip() or None
