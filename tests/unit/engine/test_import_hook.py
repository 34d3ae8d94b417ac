"""The hook acts right behind an import, and leaves the import as it would have been without it."""

from __future__ import annotations

import importlib
import sys

import pytest

from engine_patches.import_hook import ImportHook


@pytest.fixture
def hook(tmp_path, monkeypatch):
    """A hook that waits for `hooked_toy`; `hooked_user` imports it and a name out of it."""
    (tmp_path / "hooked_toy.py").write_text("value = 1\n")
    (tmp_path / "hooked_user.py").write_text("from hooked_toy import value\n")
    (tmp_path / "hooked_broken.py").write_text("raise RuntimeError('planned')\n")
    monkeypatch.syspath_prepend(tmp_path)
    seen: list[str] = []
    hook = ImportHook({"hooked_toy", "hooked_broken", "hooked_gone"}, seen.append)
    hook.seen = seen
    hook.install()
    hook.install()
    yield hook
    sys.meta_path.remove(hook)
    assert hook not in sys.meta_path
    for name in [name for name in sys.modules if name.startswith("hooked_")]:
        del sys.modules[name]


def test_it_acts_once_and_for_nothing_else(hook):
    importlib.import_module("hooked_toy")
    importlib.import_module("hooked_user")
    assert hook.seen == ["hooked_toy"]


def test_a_module_that_fails_or_is_not_there_is_not_told(hook):
    with pytest.raises(RuntimeError, match="planned"):
        importlib.import_module("hooked_broken")
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("hooked_gone")
    assert hook.seen == []
