"""The gateway with a clock at each stage of a request: `python -m tests.bench.timed_gateway FILE serve ...`.

When it stops it writes to FILE what its streams waited for, by stage, in seconds.
"""

from __future__ import annotations

import functools
import json
import signal
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Mapping, Sequence
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from proxy import cli
from proxy.http.client import Answer, Upstream, _Payload
from proxy.pipeline.dispatch import Lease
from proxy.pipeline.handler import RequestHandler
from proxy.pipeline.sse import SseRelay

# Stages in their order, by the moments between which they lie.
STAGES = {
    "reading": ("called", "read"),
    "choosing and a place": ("read", "leased"),
    "writing to the worker": ("leased", "written"),
    "the worker's head": ("written", "head"),
    "its first event": ("head", "event"),
    "writing to the client": ("event", "passed on"),
    "end: from the worker's last byte to the client's": ("last", "finished"),
    "end: until the worker is free": ("finished", "released"),
    "end: until nothing is left to do": ("finished", "over"),
}

_moments: ContextVar[dict[str, float] | None] = ContextVar("moments", default=None)


def _note(name: str, *, last: bool = False) -> None:
    if (moments := _moments.get()) is not None and (last or name not in moments):
        moments[name] = time.perf_counter()


def install() -> list[dict[str, float]]:
    """Put the clocks in; returns where the moments of each request will be."""
    found: list[dict[str, float]] = []
    call, read, payload = RequestHandler.__call__, RequestHandler._read, _Payload.write_with_length
    enter, leave, send, chunks = Lease.__aenter__, Lease.__aexit__, Upstream.send, Answer.chunks
    pass_on, finish = SseRelay._pass_on, SseRelay.finish

    @functools.wraps(call)
    async def called(self: RequestHandler, *args: Any) -> None:
        moments: dict[str, float] = {}
        _moments.set(moments)
        _note("called")
        try:
            await call(self, *args)
        finally:
            _note("over")
            found.append(moments)

    def after(function: Any, name: str) -> Any:
        @functools.wraps(function)
        async def timed(*args: Any, **named: Any) -> Any:
            try:
                return await function(*args, **named)
            finally:
                _note(name)

        return timed

    async def timed_chunks(self: Answer) -> AsyncIterator[bytes]:
        async for chunk in chunks(self):
            _note("event")
            yield chunk
        _note("last", last=True)

    RequestHandler.__call__ = called  # type: ignore[method-assign]
    RequestHandler._read = after(read, "read")  # type: ignore[method-assign]
    Lease.__aenter__ = after(enter, "leased")  # type: ignore[method-assign]
    Lease.__aexit__ = after(leave, "released")  # type: ignore[method-assign]
    _Payload.write_with_length = after(payload, "written")  # type: ignore[method-assign]
    Upstream.send = after(send, "head")  # type: ignore[method-assign]
    Answer.chunks = timed_chunks  # type: ignore[method-assign]
    SseRelay._pass_on = after(pass_on, "passed on")  # type: ignore[method-assign]
    SseRelay.finish = after(finish, "finished")  # type: ignore[method-assign]
    return found


def percentiles(found: Sequence[Mapping[str, float]]) -> dict[str, dict[str, float]]:
    """Seconds by stage and percentile."""
    taken: dict[str, list[float]] = defaultdict(list)
    for moments in found:
        for stage, (start, end) in STAGES.items():
            if start in moments and end in moments:
                taken[stage].append(moments[end] - moments[start])
    shown = {}
    for stage, seconds in taken.items():
        if len(seconds) > 1:
            cuts = statistics.quantiles(seconds, n=100, method="inclusive")
            shown[stage] = {f"p{share}": cuts[share - 1] for share in (50, 90, 99)}
    return shown


def render(shown: Mapping[str, Mapping[str, float]]) -> str:
    """A line for each stage, in milliseconds."""
    head = f"{'stage of a stream, ms':<52}{'p50':>8}{'p90':>8}{'p99':>8}"
    rows = ((stage, shown[stage].values()) for stage in STAGES if stage in shown)
    return "\n".join(
        [head, *(f"{stage:<52}" + "".join(f"{1000 * each:>8.2f}" for each in seconds) for stage, seconds in rows)]
    )


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))  # uvicorn stops, and then gives the signal its way
    moments = install()
    try:
        status = cli.main(sys.argv[2:])
    finally:
        Path(sys.argv[1]).write_text(json.dumps(percentiles(moments)))
    sys.exit(status)
