"""Whose work a sample of CPU time is."""

from __future__ import annotations

import pytest

from tests.bench.sampled import ACCOUNTING, CLIENT_SIDE, KEYS, SOCKETS, STAGES, WORKER_SIDE, stage_of

LOOP = [("/x/lib/python3.11/asyncio/runners.py", "run")]


def frame(path: str, function: str) -> tuple[str, str]:
    return f"/x/site-packages/{path}", function


@pytest.mark.parametrize(
    ("innermost", "caller", "stage"),
    [
        (frame("prometheus_client/metrics.py", "inc"), frame("proxy/pipeline/accounting.py", "_count"), ACCOUNTING),
        (frame("aiohttp/streams.py", "feed_data"), frame("aiohttp/client_proto.py", "data_received"), WORKER_SIDE),
        (frame("aiohttp/streams.py", "feed_data"), frame("aiohttp/web_protocol.py", "data_received"), CLIENT_SIDE),
        (frame("aiohttp/http_writer.py", "_writelines"), frame("aiohttp/client_reqrep.py", "send"), SOCKETS),
        (frame("proxy/server/connection.py", "write"), frame("uvicorn/httptools_impl.py", "send"), SOCKETS),
        (("/x/lib/python3.11/functools.py", "__get__"), frame("proxy/boundaries/layout.py", "layout_of"), KEYS),
        (("<string>", "<lambda>"), frame("proxy/boundaries/finder.py", "_add"), KEYS),
        (("<string>", "<lambda>"), ("<string>", "<module>"), SOCKETS),
    ],
)
def test_a_sample_belongs_to_the_innermost_frame_that_says_whose_work_it_is(innermost, caller, stage):
    assert stage_of([innermost, caller, *LOOP]) == stage and stage in STAGES
