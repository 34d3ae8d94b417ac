"""Weights replaced in place: another model in the same files, whose sizes, headers and both ends are as before."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

END_BYTES = 1 << 20


def one_tensor_by_1_percent(tensors: dict[str, Any]) -> None:
    """A projection of a layer in the middle."""
    name = sorted(name for name in tensors if "proj.weight" in name)[len(tensors) // 8]
    tensors[name] = tensors[name] * 1.01


def an_adapter_merged(tensors: dict[str, Any]) -> None:
    """A product of rank 2 added to each projection."""
    generator = torch.Generator().manual_seed(3)
    for name, weight in tensors.items():
        if "proj.weight" in name:
            low, high = (torch.randn(size, 2, generator=generator) for size in weight.shape)
            tensors[name] = (weight + (0.5 * weight.std() * low @ high.T)).to(weight.dtype)


CHANGES: Mapping[str, Callable[[dict[str, Any]], None]] = {
    "one tensor by 1 %": one_tensor_by_1_percent,
    "an adapter merged": an_adapter_merged,
}


def change(model: Path, how: Callable[[dict[str, Any]], None]) -> None:
    """Rewrite a model folder's weights, those in the first and the last MiB of each file excepted."""
    for path in model.glob("*.safetensors"):
        before = path.read_bytes()
        start = 8 + int.from_bytes(before[:8], "little")
        kept = load_file(path)
        changed = dict(kept)
        how(changed)
        save_file({name: tensor.contiguous() for name, tensor in changed.items()}, path, metadata={"format": "pt"})
        after = path.read_bytes()
        assert len(after) == len(before) and after[:start] == before[:start]
        path.write_bytes(before[:END_BYTES] + after[END_BYTES:-END_BYTES] + before[-END_BYTES:])
