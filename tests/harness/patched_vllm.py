"""The plugin's patches of vLLM's scheduler, in the test's own process: a scene on it takes milliseconds then.

Everything is as before at the end. Tests of how patches are applied do it in processes of their own.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import vllm.plugins
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import init_none_hash

from engine_patches import ledger
from engine_patches.patches import PATCHES
from tests.harness.audit import Scene, audit

Scenes = Callable[[str, dict[str, Any], dict[str, Any]], Iterator[Scene]]


@contextlib.contextmanager
def environment_kept() -> Iterator[None]:
    """What is set meanwhile ends with it: settings of a scheduler are environment variables."""
    with mock.patch.dict(os.environ):
        yield


@contextlib.contextmanager
def patched_vllm(*without: str) -> Iterator[None]:
    """All patches of modules that are imported, but those named, are in place; not what is imported later."""
    with environment_kept(), pytest.MonkeyPatch.context() as patched:
        patched.setenv("SEAMARK_ENGINE", "0")
        patched.setattr(vllm.plugins, "plugins_loaded", True)  # not by vLLM's own mechanism
        for name, fresh in {"_replaced": [], "_awaited": {}, "_live": False, "_relied_on": False}.items():
            patched.setattr(ledger, name, fresh)
        patched.setattr(ledger, "_hook", SimpleNamespace(install=lambda: None))
        init_none_hash(sha256)
        imported = [patch for patch in PATCHES if patch.target.partition(":")[0] in sys.modules]
        ledger.apply([patch for patch in imported if patch.name not in without])
        try:
            yield
        finally:
            ledger._put_back(0)


def audited(scenes: Scenes, model: Path | str, core: dict[str, Any], **wanted: Any) -> dict[str, Any]:
    """What an audit of these `scenes` finds with a `core`, within `patched_vllm`; `wanted`: see `audit.main`."""
    with environment_kept():
        return audit(scenes(str(model), wanted, core), core)
