"""The process that tries a worker's drafts without a gateway; its trial: `tests/unit/commands/test_draft_trial.py`."""

from __future__ import annotations

import os
import subprocess
import sys


def test_the_module_runs_by_itself_and_leaves_nothing_in_the_output():
    words = [sys.executable, "-m", "proxy.commands.draft_trial", "--worker", "http://127.0.0.1:9", "--parent", "-1"]
    ended = subprocess.run(words, capture_output=True, timeout=120, env=dict(os.environ), check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, b"", b"")
