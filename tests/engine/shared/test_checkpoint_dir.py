"""`seamark worker --checkpoint-dir`: a killed engine goes on from what it stored.

More: `tests/engine/test_checkpoint_dir.py`.
"""

from __future__ import annotations

from pathlib import Path

from proxy.bench.harness.servers import Servers
from tests.harness.engines import SharedServers
from tests.harness.restarts import chats_answered_by, plugin, stored_killed_and_asked


def test_a_killed_engine_goes_on_from_what_it_stored(
    servers: SharedServers, fleet: Servers, model: Path, tokenizer, tmp_path: Path
):
    chats = chats_answered_by(servers.reference, tokenizer)
    stored_killed_and_asked(fleet, model, chats, tmp_path / "states", plugin(tmp_path, "loads_always_pay"))
