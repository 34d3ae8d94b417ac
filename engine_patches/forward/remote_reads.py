"""Reads of another worker's cache blocks, declined once these may have been freed.

Here, in the worker's process, both clocks are known: vLLM's handshake measures how far they are apart.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

logger = logging.getLogger("vllm.seamark")


def decline_late_reads(original: Callable[..., None]) -> Callable[..., None]:
    """Replacement of `NixlPullConnectorWorker._read_blocks_for_req`.

    vLLM asks for the deadline only of what a decode worker lends. A prefill is as surely gone once its lease is over,
    and whoever reads its blocks then reads somebody else's states. vLLM's margin of 5 s is kept.
    """

    def _read_blocks_for_req(self: Any, req_id: str, meta: Any) -> None:
        engine = meta.remote.engine_id
        known = engine in self._remote_agents and engine not in self._invalid_remote_engines
        if not known or self._bidirectional_kv_xfer_enabled or not self._is_turn2_read_expired(meta):
            original(self, req_id, meta)
            return
        logger.warning("seamark: a prefill of worker %s came too late, request %s is computed here", engine, req_id)
        self.xfer_stats.record_kv_expired_req()
        self._handle_failed_transfer(req_id, None, self._recv_failures, record_failed_transfer=False)

    return _read_blocks_for_req
