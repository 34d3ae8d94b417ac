"""The weights that an engine computes with, known by every byte of what its workers have loaded.

A name, a revision, a file's size or a sample of it can be the same for other weights. So each worker reads what it has
loaded once, on the device that it is on, before any kernel has put it into an order of its own: then no file, format or
quantisation is left to be known, and no state is kept under the name of weights that did not compute it.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import Any, NamedTuple

from engine_patches import kv_connectors
from engine_patches.footprint import WEIGHTS
from engine_patches.forward import weight_files

# A row of so many words of 32 bits is multiplied by its own number; a step reads so many rows, 16 MiB.
COLUMNS, ROWS = 4096, 1024

WORD_BYTES = 4

logger = logging.getLogger("vllm.seamark")


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
    name = hashlib.sha256()
    for key, tensor in _tensors(model):
        words = _words(tensor)
        name.update(f"{key} {tensor.dtype} {tuple(tensor.shape)} {tensor.stride()} ".encode())
        name.update(words.numpy() if words.device.type == "cpu" else sums_of(words))
    return name.hexdigest()


def _tensors(model: Any) -> Iterator[tuple[str, Any]]:
    """Each tensor of a model once, in the order of their names."""
    held = {**dict(model.named_buffers()), **dict(model.named_parameters())}
    for key in sorted(held):
        yield from _parts(key, held[key])


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


def read_what_was_loaded(original: Callable[..., None]) -> Callable[..., None]:
    """Replacement of `process_weights_after_loading`, which puts the weights into the order that kernels want.

    Kernels of a CPU take them out of their parameters altogether.
    """

    def process_weights_after_loading(model: Any, model_config: Any, target_device: Any) -> None:
        from vllm.config import get_current_vllm_config_or_none

        config = get_current_vllm_config_or_none()
        if config is None or kv_connectors.needs_weights(config):
            setattr(model, WEIGHTS, _try_name_of(model))
        original(model, model_config, target_device)

    return process_weights_after_loading


def _try_name_of(model: Any) -> str:
    began = time.monotonic()
    try:
        name = name_of(model)
    except Exception as error:  # a parameter of a kind that nobody has seen: the engine can do without its name
        logger.warning("seamark: the weights cannot be told from others: %s", error)
        return ""
    logger.info("seamark: all weights read once in %.1f seconds", time.monotonic() - began)
    return name


def ask_workers(original: Callable[..., Any]) -> Callable[..., Any]:
    """Replacement of `EngineCore._initialize_kv_caches`, the last step before there is a scheduler."""

    def _initialize_kv_caches(self: Any, vllm_config: Any) -> Any:
        caches = original(self, vllm_config)
        if kv_connectors.needs_weights(vllm_config):
            names = self.model_executor.collective_rpc(names_in)
            setattr(vllm_config, WEIGHTS, _together(names, vllm_config))
        return caches

    return _initialize_kv_caches


def names_in(worker: Any) -> list[str]:
    """Names of what a vLLM worker has loaded: its model, and its draft model; "" if not known, or if there is none.

    And of the backends that its layers have, with the size of their kernels' blocks.
    """
    models = (getattr(worker, ask, lambda: None)() for ask in ("get_model", "get_draft_model"))
    groups = chain(*getattr(getattr(worker, "model_runner", None), "attn_groups", ()))
    backends = [(each.backend.__qualname__, getattr(each, "kernel_block_size", 0), each.layer_names) for each in groups]
    return [*(getattr(model, WEIGHTS, "") for model in models), repr(backends)]


def _together(names: Sequence[Sequence[str]], vllm_config: Any) -> Weights:
    """Weights of all ranks of an engine. `names`: as each rank has them, in their order."""
    parallel, sampled = vllm_config.parallel_config, ""
    if kv_connectors.hands_prefills_over(vllm_config):
        sampled = weight_files.name_of(vllm_config.model_config, vllm_config.load_config)
    if parallel.data_parallel_size > 1 and vllm_config.model_config.is_moe:
        return Weights(unknown="its experts are spread over data parallel ranks, each with a part", sampled=sampled)
    if not names or not all(model for model, *_ in names):
        return Weights(unknown="its weights were loaded in a way that does not let them be read", sampled=sampled)
    name = hashlib.sha256(repr([list(each[:2]) for each in names]).encode()).hexdigest()
    sizes = parallel.tensor_parallel_size, parallel.pipeline_parallel_size, bool(parallel.enable_expert_parallel)
    return Weights(name, "", repr(sizes), sampled, repr([each[2:] for each in names]))
