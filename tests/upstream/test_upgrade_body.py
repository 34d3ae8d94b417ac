"""The defect that the gateway's parser works around is still in uvicorn. The first time that this fails, it can go."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def test_uvicorn_still_reads_the_body_of_an_offered_upgrade_as_a_request():
    script = Path(__file__).parent / "upgrade_body.py"
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stdout.splitlines()[-1]) == (1, "defect present"), done.stdout + done.stderr
    assert "h11: two requests sent, expected ['/asked', '/last'], saw ['/asked', '/last']" in done.stdout
