"""Processes of the commands: what they import, and what they leave in the output."""

from __future__ import annotations

import subprocess
import sys

import pytest


def python(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *words], capture_output=True, text=True, timeout=240)


@pytest.mark.parametrize("module", ["redis", "opentelemetry"])
def test_what_is_not_asked_for_is_not_imported(module):
    done = python("-c", f"import sys, proxy.server.app; print([name for name in sys.modules if '{module}' in name])")
    assert done.stdout.strip() == "[]"


def test_the_process_that_tries_drafts_runs_by_itself_and_leaves_nothing_in_the_output():
    done = python("-m", "proxy.commands.draft_trial", "--worker", "http://127.0.0.1:9", "--parent", "-1")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
