"""A vLLM plugin for test engines only: pipeline stages in eager mode on a CPU, where vLLM ends at the first prompt.

A stage but the first copies what it receives into tensors that vLLM makes while it profiles or warms a model up. Its
CPU worker does neither in eager mode.
"""

from __future__ import annotations

import functools
from typing import Any


def register() -> None:
    """Make these tensors where they are first needed."""
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner

    original = CPUModelRunner.sync_and_gather_intermediate_tensors
    if getattr(original, "makes_tensors", False):
        return

    @functools.wraps(original)
    def sync_and_gather_intermediate_tensors(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.intermediate_tensors is None:
            self.intermediate_tensors = self.model.make_empty_intermediate_tensors(
                batch_size=self.max_num_tokens, dtype=self.model_config.dtype, device=self.device
            )
        return original(self, *args, **kwargs)

    sync_and_gather_intermediate_tensors.makes_tensors = True  # type: ignore[attr-defined]
    CPUModelRunner.sync_and_gather_intermediate_tensors = sync_and_gather_intermediate_tensors
