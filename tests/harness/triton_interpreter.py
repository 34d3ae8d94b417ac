"""vLLM's kernels for CUDA on a CPU: Triton's interpreter, with its gaps closed, and a platform that is no CPU to vLLM.

`prepare` comes before anything of vLLM is imported, in a process of its own (`tests.harness.versions.interpreted`, with
Triton). The interpreter runs a kernel's Python block by block with numpy: the arithmetic and the indices are those of a
GPU; the order of sums inside a product, tensor cores and everything that runs at once are not.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np

FLA_OPS = "vllm.third_party.flash_linear_attention.ops"


def prepare() -> None:
    """Close the interpreter's gaps, and have vLLM take this machine for one that is neither CPU nor CUDA."""
    admit_triton()
    import vllm.platforms
    from vllm.platforms.cpu import CpuPlatform
    from vllm.platforms.interface import UnspecifiedPlatform

    class Interpreter(UnspecifiedPlatform):
        device_type = "cpu"
        device_name = "interpreter"
        import_kernels = CpuPlatform.import_kernels  # which library is this CPU's: `vllm._C` is for AVX-512 alone

        @classmethod
        def get_device_name(cls, device_id: int = 0) -> str:
            return "interpreter"

        @classmethod
        def is_pin_memory_available(cls) -> bool:
            return False

    vllm.platforms._current_platform = Interpreter()


def bind_late(*more: str) -> None:
    """To be called once FLA's ops are imported: they bind `tl.exp` and others before the interpreter replaces those.

    `more`: beginnings of names of modules that do the same.
    """
    from triton import language

    for module in [module for name, module in sys.modules.items() if name.startswith((FLA_OPS, *more))]:
        module.range = _range  # type: ignore[attr-defined]
        for name in {"exp", "exp2", "log", "log2", "gather"} & vars(module).keys():
            if getattr(vars(module)[name], "__module__", "").startswith("triton.language"):
                setattr(module, name, _late(language, name))


def _late(language: Any, name: str) -> Any:
    return lambda *args, **kwargs: getattr(language, name)(*args, **kwargs)


def _range(*bounds: Any) -> Iterator[Any]:
    """`range` in a kernel: its loop variable is a scalar of Triton's, with a `.to(tl.int64)`."""
    from triton import language
    from triton.runtime.interpreter import TensorHandle

    plain = range(*(int(bound) for bound in bounds))
    if not any(isinstance(bound, language.tensor) for bound in bounds):
        return iter(plain)
    handles = (TensorHandle(np.array([number], dtype=np.int32), language.int32) for number in plain)
    return (language.tensor(handle, language.int32) for handle in handles)


def admit_triton() -> None:
    """Close the interpreter's gaps, and have vLLM's CPU build accept a Triton without a driver for CPUs."""
    import triton.backends

    driver = SimpleNamespace(is_active=lambda: False)
    triton.backends.backends["cpu"] = SimpleNamespace(driver=driver, compiler=None)
    interpreter = importlib.import_module("triton.runtime.interpreter")
    _copy_meta(interpreter)
    _take_any_mask(interpreter)
    _compute_bfloat16(interpreter)


def _copy_meta(interpreter: Any) -> None:
    """A grid function may write into what it is given: a copy once compiled, the kernel's arguments here."""
    executor = interpreter.GridExecutor
    original = executor.__init__

    def __init__(self: Any, fn: Any, arg_names: Any, grid: Any, *args: Any, **kwargs: Any) -> None:
        of_copy = (lambda meta: grid(dict(meta))) if callable(grid) else grid
        original(self, fn, arg_names, of_copy, *args, **kwargs)

    executor.__init__ = __init__


def _take_any_mask(interpreter: Any) -> None:
    """A Python integer compared with a tensor, and a block of flags, make a mask that is no `int1`."""
    builder = interpreter.InterpreterBuilder
    load, store = builder.create_masked_load, builder.create_masked_store

    def flags(mask: Any) -> Any:
        if mask.data.dtype == bool:
            return mask
        return interpreter.TensorHandle(mask.data.astype(bool), interpreter.tl.int1)

    builder.create_masked_load = lambda self, pointers, mask, *rest: load(self, pointers, flags(mask), *rest)
    builder.create_masked_store = lambda self, pointers, value, mask, cache: store(
        self, pointers, value, flags(mask), cache
    )


def _compute_bfloat16(interpreter: Any) -> None:
    """The interpreter computes on the bits of bfloat16. Here: in float32, then to the nearest, even at a tie."""
    builder, handle_of, language = interpreter.InterpreterBuilder, interpreter.TensorHandle, interpreter.tl
    cast, binary, unary, dot = builder.cast_impl, builder.binary_op, builder.unary_op, builder.create_dot

    def is_narrow(handle: Any) -> bool:
        return bool(handle.dtype.scalar == language.bfloat16)

    def widened(handle: Any) -> Any:
        if not is_narrow(handle):
            return handle
        return handle_of((handle.data.astype(np.uint32) << 16).view(np.float32), language.float32)

    def narrowed(data: Any) -> Any:
        bits = np.ascontiguousarray(data, dtype=np.float32).view(np.uint32)
        rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
        return handle_of(np.where(np.isnan(data), np.uint16(0x7FC0), rounded), language.bfloat16)

    def cast_impl(self: Any, source: Any, dtype: Any) -> Any:
        if is_narrow(source) and dtype.scalar != language.bfloat16:
            wide = widened(source)
            return wide if dtype.scalar == language.float32 else cast(self, wide, dtype)
        if dtype.scalar == language.bfloat16 and not is_narrow(source):
            return narrowed(source.data.astype(np.float32))
        return cast(self, source, dtype)

    def binary_op(self: Any, left: Any, right: Any, operation: Any) -> Any:
        if not (is_narrow(left) or is_narrow(right)):
            return binary(self, left, right, operation)
        found = binary(self, widened(left), widened(right), operation)
        return narrowed(found.data) if found.data.dtype == np.float32 else found

    def unary_op(self: Any, value: Any, operation: Any) -> Any:
        return narrowed(operation(widened(value).data)) if is_narrow(value) else unary(self, value, operation)

    def create_dot(self: Any, left: Any, right: Any, *rest: Any) -> Any:
        return dot(self, widened(left), widened(right), *rest)

    builder.cast_impl, builder.binary_op = cast_impl, binary_op
    builder.unary_op, builder.create_dot = unary_op, create_dot
