"""Weights by samples of the files that they are in: every tensor's, by the places that the files themselves name.

They are the same however an engine cuts its weights into pieces, at the price of what samples can miss: values that
change in a small part of a tensor alone.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

PATTERNS = ("*.safetensors", "*.bin", "*.pt", "*.gguf")

# Of each tensor, and of each such part of a file that does not say where its tensors are, so many samples of so many
# bytes: of 100 GB in 70,000 tensors 290 MB, most of it in the page cache, since it was just loaded.
PART_BYTES = 1 << 20
SAMPLES, SAMPLE_BYTES = 4, 1024

READERS = 16  # threads


def name_of(model_config: Any, load_config: Any) -> str:
    """Hex of all files of a vLLM `ModelConfig`'s weights, and of how they are loaded; "" if they are no files here."""
    try:
        files = _files(model_config, load_config)
        with ThreadPoolExecutor(READERS) as pool:
            samples = list(pool.map(_sampled, files))
    except (OSError, ValueError, LookupError, TypeError, AttributeError):  # none here, or one that is no such file
        return ""
    facts = [str(model_config.dtype), str(model_config.quantization), samples]
    return hashlib.sha256(repr(facts).encode()).hexdigest() if samples else ""


def _files(model_config: Any, load_config: Any) -> list[Path]:
    model = Path(model_config.model)
    if model.is_file():
        return [model]
    if not model.is_dir():
        from huggingface_hub import snapshot_download

        where = {"cache_dir": load_config.download_dir, "revision": model_config.revision}
        model = Path(snapshot_download(model_config.model, local_files_only=True, **where))
    return sorted(path for pattern in PATTERNS for path in model.glob(pattern))


def _sampled(path: Path) -> list[str]:
    """Size and hash of a file's samples."""
    sampled = hashlib.sha256()
    with path.open("rb") as file:
        size = file.seek(0, 2)
        for start, end in _parts(file, size) if path.suffix == ".safetensors" else _slices(size):
            step = max((end - start - SAMPLE_BYTES) // (SAMPLES - 1), SAMPLE_BYTES)
            for place in range(start, end, step):
                file.seek(place)
                sampled.update(file.read(min(SAMPLE_BYTES, end - place)))
    return [str(size), sampled.hexdigest()]


def _slices(size: int) -> Iterator[tuple[int, int]]:
    for start in range(0, size, PART_BYTES):
        yield start, min(start + PART_BYTES, size)


def _parts(file: Any, size: int) -> Iterator[tuple[int, int]]:
    """[start, end) of a safetensors file's header, in slices, and of each of its tensors. Raises `ValueError`."""
    file.seek(0)
    start = 8 + int.from_bytes(file.read(8), "little")
    if start > size:
        raise ValueError(f"{file.name} ends inside its header")
    header = json.loads(file.read(start - 8))
    yield from _slices(start)
    for name, tensor in sorted(header.items()):
        if name != "__metadata__":
            first, last = tensor["data_offsets"]
            yield start + first, start + last
