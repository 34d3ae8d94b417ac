"""What an engine says of a request, where the gateway's own word may hide a deeper cause.

The worker's feed (`engine_patches/feed.py`) lists what is new. An engine reports a request when it admits it, so the
word is there when the answer is. Asking takes about a millisecond and is only done for requests that missed.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import OrderedDict
from dataclasses import dataclass, field
from urllib.parse import urlencode

from proxy.upstream import Broken, Unreachable, Upstream
from proxy.workers import Worker

PATH = "/seamark/outcomes"
TIMEOUT = 0.2  # seconds for all of it; an explanation is not worth more
SILENT_SECONDS = 10.0  # a feed that failed is left alone for so long
MAX_WORDS = 8192  # of requests that nobody has asked about, per worker


@dataclass
class _Read:
    """What was read of one worker's feed."""

    boot: str = ""
    cursor: int = 0
    silent_until: float = 0.0  # time.monotonic(): it failed, and is not asked before
    words: OrderedDict[str, str] = field(default_factory=OrderedDict)  # reason by request id
    reading: asyncio.Lock = field(default_factory=asyncio.Lock)


class EngineWords:
    """The feeds of all workers, read as they are needed."""

    def __init__(self, upstream: Upstream) -> None:
        self._upstream = upstream
        self._feeds: dict[str, _Read] = {}

    async def word(self, worker: Worker, request_id: str) -> str | None:
        """The engine's reason for a request that `worker` has answered; None where it does not say."""
        feed = self._feeds.setdefault(worker.url, _Read())
        if request_id not in feed.words and time.monotonic() >= feed.silent_until:
            try:
                await asyncio.wait_for(self._read(worker, feed, request_id), TIMEOUT)
            except (TimeoutError, Unreachable, Broken, ValueError, KeyError, TypeError):  # gone, or without a feed
                feed.silent_until = time.monotonic() + SILENT_SECONDS
        return feed.words.pop(request_id, None)

    async def _read(self, worker: Worker, feed: _Read, wanted: str) -> None:
        async with feed.reading:
            if wanted in feed.words:  # whoever read before has brought it
                return
            query = urlencode({"boot": feed.boot, "after": feed.cursor})
            status, answer = await self._upstream.fetch("GET", f"{worker.url}{PATH}?{query}")
            if status != 200:
                raise ValueError(f"status {status}")
            told = json.loads(answer)
            for request_id, reason, _ in told["outcomes"]:
                feed.words[request_id] = str(reason)
                feed.words.move_to_end(request_id)
            feed.boot, feed.cursor = str(told["boot"]), int(told["cursor"])
        while len(feed.words) > MAX_WORDS:
            feed.words.popitem(last=False)
