"""What the plugin and vLLM choose on a GPU, on a CPU with Triton's interpreter: before an engine is made."""

from __future__ import annotations

import sys
from typing import Any

from engine_patches import patches

# Modules that choose by the platform between kernels, and are to choose those of a GPU.
CHOOSE_KERNELS = (
    "vllm.model_executor.layers.mamba.",
    "engine_patches.forward.scan_states",
)

# Cures of what vLLM's kernels for CPUs lack.
OF_CPU_KERNELS = {f"cpu-checkpoint-{x}" for x in ("scan", "kernel", "store")} | {"gdn-core-cpu", "gdn-core-cpu-drafts"}

OF_RUNNER_V2 = {"worker-steps-v2", "worker-batch-v2"}


def take_runner_v2(kind: object = None) -> None:
    """Have the plugin's patches of model runner V2 apply, and take layers (of a kind) for those of a GPU."""
    from engine_patches.forward import layers

    for row in _rows(OF_RUNNER_V2):
        object.__setattr__(row, "on", None)  # frozen
    layers._is_configured = lambda known, config: kind is None or known.kind == kind


def _rows(names: set[str]) -> list[Any]:
    rows = [row for row in patches.PATCHES if row.name in names]
    assert {row.name for row in rows} == names
    return rows


def choose_kernels_of_a_gpu() -> None:
    """Have the modules of `CHOOSE_KERNELS` take this machine for no CPU. Before they are imported."""
    from vllm import _custom_ops
    from vllm.platforms import current_platform

    of_class = type(current_platform)

    def is_cpu(self: Any) -> bool:
        asking: str = sys._getframe(1).f_globals["__name__"]
        return not asking.startswith(CHOOSE_KERNELS)

    of_class.is_cpu = is_cpu
    # With it, weights of convolutions are put into the order of the CPU's kernels.
    if hasattr(_custom_ops, "causal_conv1d_weight_pack"):
        del _custom_ops.causal_conv1d_weight_pack
    for row in _rows(OF_CPU_KERNELS):
        object.__setattr__(row, "applies", lambda: False)  # frozen
