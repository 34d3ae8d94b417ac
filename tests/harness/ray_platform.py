"""vLLM's platform for the plugins of `ray_workers`: a module of its own, since vLLM is imported to load it."""

from __future__ import annotations

from vllm.platforms.cpu import CpuPlatform


class CpuOfRay(CpuPlatform):
    """A CPU on which Ray can start workers."""

    ray_device_key = "GPU"
