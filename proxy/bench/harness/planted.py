"""Planted defects: proof that the exactness check would notice. A vLLM plugin for test engines only.

While the file that `FILE_VARIABLE` names holds the name of a defect, the engine has that defect.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator, Mapping
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

FILE_VARIABLE = "SEAMARK_PLANTED_DEFECT_FILE"
OTHER_STATE, EARLY_STATE, COPY_CURE_OFF = "another prefix's state", "a state one unit early", "the copy cure off"
DEFECTS = (OTHER_STATE, EARLY_STATE, COPY_CURE_OFF)
_COPY = "copy_kv_cache_blocks_inplace"  # of a partial cache block; vLLM imports it by name


def environment(folder: Path, others: Mapping[str, str] = {}) -> Mapping[str, str]:
    """Environment of an engine in which defects can be planted, in `folder`, and that has `others`' plugins as well."""
    own = {"seamark_planted": "proxy.bench.harness.planted:register"}
    return {**plugin_environment(folder, {**own, **others}), FILE_VARIABLE: str(_file(folder))}


def plugin_environment(folder: Path, plugins: Mapping[str, str]) -> Mapping[str, str]:
    """Environment of an engine that loads `plugins`, names to `module:function`; `folder` holds their metadata."""
    metadata = folder / "seamark_test_plugins-0.dist-info"
    metadata.mkdir(parents=True, exist_ok=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: seamark-test-plugins\nVersion: 0\n")
    lines = ["[vllm.general_plugins]", *(f"{name} = {target}" for name, target in plugins.items()), ""]
    (metadata / "entry_points.txt").write_text("\n".join(lines))
    return {"PYTHONPATH": os.pathsep.join(filter(None, (str(folder), os.environ.get("PYTHONPATH"))))}


@contextlib.contextmanager
def planted(folder: Path, defect: str) -> Iterator[None]:
    """While inside, the engine started with `environment(folder)` has `defect`."""
    _file(folder).write_text(defect)
    try:
        yield
    finally:
        _file(folder).unlink()


def _file(folder: Path) -> Path:
    return folder / "defect"


def _present() -> str:
    try:
        return Path(os.environ[FILE_VARIABLE]).read_text()
    except (KeyError, FileNotFoundError):
        return ""


def register() -> None:
    """The plugin: wraps the prefix lookup, and puts vLLM's own block copy back on demand."""
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.worker import utils

    for plugin in entry_points(group="vllm.general_plugins", name="seamark"):
        plugin.load()()  # the cures come first, so that there is something to take off
    if not hasattr(KVCacheManager.get_computed_blocks, "planted"):
        KVCacheManager.get_computed_blocks = _with_wrong_states(KVCacheManager.get_computed_blocks)
        copy = _with_cure_off(getattr(utils, _COPY))
        runners = ("vllm.v1.worker.gpu_model_runner", "vllm.v1.worker.gpu.model_runner")
        for module in (utils, *(sys.modules[name] for name in runners if name in sys.modules)):
            setattr(module, _COPY, copy)


def _with_cure_off(cured: Any) -> Any:
    def copy_kv_cache_blocks_inplace(*args: Any) -> Any:
        return (cured.__seamark_original__ if _present() == COPY_CURE_OFF else cured)(*args)

    return _as_patch(copy_kv_cache_blocks_inplace, cured)


def _as_patch(wrapper: Any, wrapped: Any) -> Any:
    """`wrapper`, marked so that the ledger still finds its own patch `wrapped` applied."""
    wrapper.__seamark_original__ = wrapped
    return wrapper


def _with_wrong_states(original: Any) -> Any:
    from vllm.v1.core.kv_cache_utils import get_block_hash, get_group_id, make_block_hash_with_group_id
    from vllm.v1.core.single_type_kv_cache_manager import MambaManager

    def get_computed_blocks(self: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
        found = original(self, request, *args, **kwargs)
        blocks, hit = found[0], found[1]
        defect = _present()
        if not hit or defect not in (OTHER_STATE, EARLY_STATE):
            return found
        own = set(request.block_hashes)
        for manager in self.coordinator.single_type_managers:
            if not isinstance(manager, MambaManager):
                continue
            group = manager.kv_cache_group_id
            cached = self.block_pool.cached_block_hash_to_block
            if defect == EARLY_STATE:
                # One unit where the request before left a state there, else as few as there are.
                units = range(hit // self.block_pool.hash_block_size - 2, -1, -1)
                keys = (make_block_hash_with_group_id(request.block_hashes[unit], group) for unit in units)
            else:
                keys = (key for key in cached._cache if get_group_id(key) == group and get_block_hash(key) not in own)
            wrong = next(filter(None, map(cached.get_one_block, keys)), None)
            if wrong is not None:
                blocks.blocks[group][-1] = wrong
        return found

    wrapper = _as_patch(get_computed_blocks, original)
    wrapper.planted = True
    return wrapper
