"""What an engine says of a request, where the gateway's own word may hide a deeper cause.

The worker's feed (`engine_patches/feed.py`) lists what is new. An engine reports a request when it admits it, so the
word is there when the answer is. Asking takes about a millisecond and is only done for requests that missed.
"""

from __future__ import annotations

import asyncio
import json
from collections import OrderedDict
from dataclasses import dataclass, field
from urllib.parse import urlencode

from proxy.upstream import Broken, Unreachable, Upstream
from proxy.workers import Worker

PATH = "/seamark/outcomes"
TIMEOUT = 0.2  # seconds; an explanation is not worth more
MAX_WORDS = 8192  # of requests that nobody has asked about, per worker


@dataclass
class _Read:
    """What was read of one worker's feed."""

    boot: str = ""
    cursor: int = 0
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
        async with feed.reading:
            if request_id not in feed.words:
                try:
                    await self._read(worker, feed)
                except (Unreachable, Broken, ValueError, KeyError, TypeError):  # gone, or a worker without a feed
                    return None
            return feed.words.pop(request_id, None)

    async def _read(self, worker: Worker, feed: _Read) -> None:
        query = urlencode({"boot": feed.boot, "after": feed.cursor})
        status, answer = await self._upstream.fetch("GET", f"{worker.url}{PATH}?{query}", timeout=TIMEOUT)
        if status != 200:
            return
        told = json.loads(answer)
        feed.boot, feed.cursor = str(told["boot"]), int(told["cursor"])
        for request_id, reason, _ in told["outcomes"]:
            feed.words[request_id] = reason
            feed.words.move_to_end(request_id)
        while len(feed.words) > MAX_WORDS:
            feed.words.popitem(last=False)
