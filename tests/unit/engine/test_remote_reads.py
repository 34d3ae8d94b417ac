"""A prefill whose blocks may have been freed is not read: the request is computed here, and vLLM hears of it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from engine_patches.forward.remote_reads import decline_late_reads


class Worker:
    """vLLM's, as far as it is asked."""

    def __init__(self, *, known: bool, invalid: bool, lends: bool, late: bool) -> None:
        self._remote_agents = {"w": 1} if known else {}
        self._invalid_remote_engines = {"w"} if invalid else set()
        self._bidirectional_kv_xfer_enabled = lends
        self._recv_failures: list[Any] = []
        self.late, self.expired, self.failed = late, 0, []
        self.xfer_stats = SimpleNamespace(record_kv_expired_req=self._expire)

    def _expire(self) -> None:
        self.expired += 1

    def _is_turn2_read_expired(self, meta: Any) -> bool:
        return self.late

    def _handle_failed_transfer(self, *arguments: Any, **options: Any) -> None:
        self.failed.append((arguments, options))


META = SimpleNamespace(remote=SimpleNamespace(engine_id="w"))


@pytest.mark.parametrize(
    ("known", "invalid", "lends", "late", "is_read"),
    [
        (True, False, False, False, True),
        (True, False, False, True, False),
        (False, False, False, True, True),  # its clock is not known yet: vLLM shakes hands first
        (True, True, False, True, True),  # vLLM gives it up itself
        (True, False, True, True, True),  # vLLM asks for the deadline itself
    ],
)
def test_only_a_read_that_is_known_to_come_too_late_is_declined(known, invalid, lends, late, is_read):
    read: list[Any] = []
    worker = Worker(known=known, invalid=invalid, lends=lends, late=late)
    decline_late_reads(lambda self, *arguments: read.append(arguments))(worker, "r", META)
    assert read == ([("r", META)] if is_read else [])
    failed = (("r", None, worker._recv_failures), {"record_failed_transfer": False})
    assert worker.failed == ([] if is_read else [failed]) and worker.expired == (not is_read)
