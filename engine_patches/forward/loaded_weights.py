"""The weights that an engine computes with, known by every byte of what its workers have loaded.

A name, a revision, a file's size or a sample of it can be the same for other weights. So each worker reads what it has
loaded once, on the device that it is on, before any kernel has put it into an order of its own.

Engines that cut their weights otherwise know each other by samples of the files that these are in: of every tensor, by
the places that the files themselves name. They miss values that change in a small part of a tensor alone.
"""

from __future__ import annotations

import functools
import hashlib
import json
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from engine_patches import kv_connectors
from engine_patches.footprint import WEIGHTS
from engine_patches.ledger import CORE, Function, Patch
from engine_patches.settings import logger

# A row of so many words of 32 bits is multiplied by its own number; a step reads so many rows, 16 MiB.
COLUMNS, ROWS = 4096, 1024

WORD_BYTES = 4

PATTERNS = ("*.safetensors", "*.bin", "*.pt", "*.gguf")

# Of each tensor, and of each such part of a file that does not say where its tensors are, so many samples of so many
# bytes: of 100 GB in 70,000 tensors 290 MB, most of it in the page cache, since it was just loaded.
PART_BYTES = 1 << 20
SAMPLES, SAMPLE_BYTES = 4, 1024

READERS = 16  # threads


class Weights(NamedTuple):
    """What is known of the weights of an engine. Names are hex; "" says nothing, and is the same as no other."""

    name: str = ""  # the same only for the same values in all parameters of all ranks
    unknown: str = "what its workers have loaded was not read"  # why there is no name, if there is none
    cut: str = ""  # into which pieces for ranks; engines that cut otherwise have other names for the same weights
    sampled: str = ""  # by samples of the files, for those
    backends: str = ""  # of attention and states, whose kernels lay out what they cache

    @classmethod
    def of(cls, vllm_config: Any) -> Weights:
        """Those of the engine that a `VllmConfig` belongs to, as far as its workers have told."""
        found: Weights = getattr(vllm_config, WEIGHTS, cls())
        return found


def name_of(model: Any) -> str:
    """Hex of the values in a `torch.nn.Module`'s parameters and buffers. Raises what a tensor without values raises."""
    name, held = hashlib.sha256(), {**dict(model.named_buffers()), **dict(model.named_parameters())}
    for key, tensor in chain.from_iterable(_parts(key, held[key]) for key in sorted(held)):
        words = _words(tensor)
        name.update(f"{key} {tensor.dtype} {tuple(tensor.shape)} {tensor.stride()} ".encode())
        name.update(words.numpy() if words.device.type == "cpu" else sums_of(words))
    return name.hexdigest()


def _parts(key: str, tensor: Any) -> Iterator[tuple[str, Any]]:
    """The tensors that hold a parameter's bytes: itself, or those that it wraps or collects until all are loaded."""
    from torch.nn.parameter import is_lazy
    from torch.utils._python_dispatch import is_traceable_wrapper_subclass

    if is_lazy(tensor):  # GGUF: the parts of a fused layer, in the order in which they came
        came = getattr(tensor, "data_container", ())
        inner = {f"{number} {getattr(tensor, 'shard_id', '')}": part for number, part in enumerate(came)}
    elif getattr(tensor, "partitions", None):  # vLLM's `SharedWeightParameter`
        inner = tensor.partitions
    elif is_traceable_wrapper_subclass(tensor):  # TorchAO's
        inner = {name: getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]}
    else:
        yield key, tensor
        return
    if not inner:
        raise ValueError(f"{key} holds no values yet")
    for name, part in inner.items():
        yield from _parts(f"{key}.{name}", part)


def sums_of(words: Any) -> bytes:
    """For each of `COLUMNS` columns of words the sum of its words, each times its row's number, modulo 2**64.

    Two passes over memory, where a device has no hash of its own. A word that changes alone always changes its sum, for
    the numbers are odd. Several in one column cancel each other out once in 2**32 at most, and in many columns so much
    more rarely.
    """
    whole = len(words) // COLUMNS * COLUMNS
    rows = words[:whole].view(-1, COLUMNS)
    numbers = _numbers(len(rows).bit_length()).to(words.device)
    sums = numbers.new_zeros(COLUMNS)
    sums[: len(words) - whole] = words[whole:].long() * numbers[-1]
    for start in range(0, len(rows), ROWS):
        some = rows[start : start + ROWS]
        sums += (some * numbers[start : start + len(some), None]).sum(0)
    found: bytes = sums.cpu().numpy().tobytes()
    return found


def _words(tensor: Any) -> Any:
    """A tensor's bytes, in the order of its memory, as integers of 32 bits; the last one is filled up with zeros."""
    import torch

    tensor = tensor.detach()
    order = sorted(range(tensor.dim()), key=lambda dim: (-tensor.stride(dim), dim))
    found = tensor.permute(order).contiguous().view(-1).view(torch.uint8)  # a transposed one is not copied
    if missing := -len(found) % WORD_BYTES:
        found = torch.cat((found, found.new_zeros(missing)))
    elif found.storage_offset() % WORD_BYTES:
        found = found.clone()
    return found.view(torch.int32)


@functools.cache
def _numbers(bits: int) -> Any:
    """Odd numbers of 64 bits, more than a number of `bits` bits can count; the same everywhere."""
    import torch

    generator = torch.Generator("cpu").manual_seed(2**31 - 1)
    drawn = torch.randint(-(1 << 62), 1 << 62, (1 + (1 << bits),), generator=generator, device="cpu")
    return drawn * 2 + 1


def name_of_files(model_config: Any, load_config: Any) -> str:
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
        for start, end in _tensors_in(file, size) if path.suffix == ".safetensors" else _slices(size):
            step = max((end - start - SAMPLE_BYTES) // (SAMPLES - 1), SAMPLE_BYTES)
            for place in range(start, end, step):
                file.seek(place)
                sampled.update(file.read(min(SAMPLE_BYTES, end - place)))
    return [str(size), sampled.hexdigest()]


def _slices(size: int) -> Iterator[tuple[int, int]]:
    for start in range(0, size, PART_BYTES):
        yield start, min(start + PART_BYTES, size)


def _tensors_in(file: Any, size: int) -> Iterator[tuple[int, int]]:
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


@Patch(
    "loaded-weights",
    "vllm.model_executor.model_loader.utils:process_weights_after_loading",
    why="states that outlive a process, or come from another one, are right for these weights alone",
    until="vLLM names what it has loaded by its contents",
    upstream="none: vLLM's tiers on disk name weights by the model's name",
    rebind=(
        "vllm.model_executor.model_loader.base_loader",
        "vllm.model_executor.model_loader.weight_cache.ipc_loader",
    ),
)
def read_what_was_loaded(model: Any, model_config: Any, target_device: Any, *, original: Function) -> None:
    """Replacement of `process_weights_after_loading`, which puts the weights into the order that kernels want."""
    from vllm.config import get_current_vllm_config_or_none

    config = get_current_vllm_config_or_none()
    if config is None or kv_connectors.needs_weights(config):
        setattr(model, WEIGHTS, _try_name_of(model))
    original(model, model_config, target_device)


def _try_name_of(model: Any) -> str:
    began = time.monotonic()
    try:
        name = name_of(model)
    except Exception as error:  # a parameter of a kind that nobody has seen: the engine can do without its name
        logger.warning("seamark: the weights cannot be told from others: %s", error)
        return ""
    logger.info("seamark: all weights read once in %.1f seconds", time.monotonic() - began)
    return name


@Patch(
    "asked-weights",
    f"{CORE}._initialize_kv_caches",
    why="the scheduler has to know what the workers have loaded before it finds or keeps a state",
    until="vLLM names what it has loaded by its contents",
    mentions=("self.model_executor.initialize_from_config(kv_cache_configs)",),
)
def ask_workers(self: Any, vllm_config: Any, *, original: Function) -> Any:
    """Replacement of `EngineCore._initialize_kv_caches`, the last step before there is a scheduler."""
    caches = original(self, vllm_config)
    if kv_connectors.needs_weights(vllm_config):
        names = self.model_executor.collective_rpc(names_in)
        setattr(vllm_config, WEIGHTS, _together(names, vllm_config))
    return caches


def names_in(worker: Any) -> list[str]:
    """Names of a vLLM worker's model and draft model, "" if unknown or none, and its backends with their blocks."""
    models = (getattr(worker, ask, lambda: None)() for ask in ("get_model", "get_draft_model"))
    groups = chain(*getattr(getattr(worker, "model_runner", None), "attn_groups", ()))
    backends = [(each.backend.__qualname__, getattr(each, "kernel_block_size", 0), each.layer_names) for each in groups]
    return [*(getattr(model, WEIGHTS, "") for model in models), repr(backends)]


def _together(names: Sequence[Sequence[str]], vllm_config: Any) -> Weights:
    """Weights of all ranks of an engine. `names`: as each rank has them, in their order."""
    parallel, sampled = vllm_config.parallel_config, ""
    if kv_connectors.hands_prefills_over(vllm_config):
        sampled = name_of_files(vllm_config.model_config, vllm_config.load_config)
    if parallel.data_parallel_size > 1 and vllm_config.model_config.is_moe:
        return Weights(unknown="its experts are spread over data parallel ranks, each with a part", sampled=sampled)
    if not names or not all(model for model, *_ in names):
        return Weights(unknown="its weights were loaded in a way that does not let them be read", sampled=sampled)
    name = hashlib.sha256(repr([list(each[:2]) for each in names]).encode()).hexdigest()
    sizes = parallel.tensor_parallel_size, parallel.pipeline_parallel_size, bool(parallel.enable_expert_parallel)
    return Weights(name, "", repr(sizes), sampled, repr([each[2:] for each in names]))
