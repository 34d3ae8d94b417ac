"""The engines that engine tests share."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from proxy.bench.harness.servers import Server

FLOAT32_DELTA = {"seamark_float32_delta": "tests.harness.float32_delta:register"}

EAGER_STAGES = {"seamark_eager_stages": "tests.harness.engine_plugins:eager_stages"}

# Of an engine that is one process on a CPU, beside others.
CPU_PROCESS = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "TORCH_COMPILE_DISABLE": "1",
}

# An address of this machine from which the engine `seamark` takes hints in a header; other clients use 127.0.0.1.
TRUSTED_HOP = "127.0.0.2"


class SharedServers(NamedTuple):
    """Engines in the configurations that the tests need."""

    seamark: Server  # patched, room to cache
    planted: Path  # where defects can be planted in it
    tight: Server  # patched, 64 cache blocks (half of them for pins), 320 tokens per step; can be put to sleep
    reference: Server  # cures only, no prefix caching
    untouched: Server  # vLLM as it is
    gateway: Server  # in front of `seamark`
    tight_gateway: Server
    untouched_gateway: Server
