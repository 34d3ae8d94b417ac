"""Broken and ambiguous requests break nothing; short runs of the benchmarks that attack and measure the gateway."""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import AsyncIterator

import httptools
import pytest

from tests.bench import attacks, fuzz_framing, gateway_cost
from tests.bench.fuzz import GATEWAY_FLAGS, Run, fuzz, render
from tests.bench.fuzz_cases import REFUSED, Case, case, name_of
from tests.bench.fuzz_framing import SMUGGLED
from tests.bench.gateway_cost import BARE, CASES, DIRECT, SEAMARK
from tests.harness.gateways import CHAT, GatewayForks, chat
from tests.harness.raw_http import Connection, request
from tests.harness.raw_worker import RawWorker, started


@pytest.mark.parametrize("cases", [200, pytest.param(2000, marks=pytest.mark.thorough)])
async def test_nothing_breaks_at_broken_requests(tmp_path, cases):
    with GatewayForks(tmp_path) as fleet:
        rare = next(number for number in itertools.count() if case(1, number).kind == "at a limit")
        result = await fuzz(fleet, seed=1, seconds=0, only=sorted({*range(cases), rare}))
    assert result.held, render(result)
    kinds = {"well framed", "pipelined", "ambiguous", "odd", "mutated", "half", "at a limit"}
    assert kinds <= set(result.kinds)
    assert min(result.reached, result.statuses[200]) > cases / 2 and result.statuses[400] > cases / 20


@pytest.fixture
async def worker() -> AsyncIterator[RawWorker]:
    async with RawWorker() as made:
        yield made


async def test_no_ambiguous_request_gets_past_the_gateway(worker, tmp_path):
    with GatewayForks(tmp_path) as fleet:
        run = Run(await started(fleet.gateway(worker, flags=GATEWAY_FLAGS)), worker, 0)
        for number, wrong in enumerate(fuzz_framing.ambiguous("")):
            data = fuzz_framing.ambiguous(name_of(0, number))[wrong]
            assert await run.judged(Case(number, wrong, REFUSED, [data])) == "", wrong
        assert await run.left_behind() == []
        assert not worker.seen.keys() - {"last"}


BODY = json.dumps(chat("Tide?")).encode()

HIDDEN = b"GET %b HTTP/1.1\r\nhost: w\r\n\r\n" % SMUGGLED

# By which a client could make a server behind the gateway see another framing, or another protocol.
FIELDS = {
    "upgrade": {"connection": "upgrade", "upgrade": "h2c", "http2-settings": "AAMAAABkAARAAAAAAAIAAAAA"},
    "upgrade unnamed": {"upgrade": "websocket"},
    "websocket": {"connection": "keep-alive, Upgrade", "upgrade": "websocket", "sec-websocket-key": "x"},
    "te": {"te": "trailers, chunked"},
    "trailer": {"trailer": "content-length"},
    "keep-alive": {"connection": "close, content-length", "keep-alive": "timeout=1"},
    "expect": {"expect": "100-continue"},
    "proxy": {"proxy-connection": "keep-alive", "proxy-authorization": "Basic x"},
    "names like framing": {"x-transfer-encoding": "chunked", "content_length": "0", "transfer_encoding": "chunked"},
}

HOP_BY_HOP = {b"upgrade", b"te", b"trailer", b"transfer-encoding", b"keep-alive", b"expect", b"proxy-authorization"}


class Reader:
    """What vLLM's server makes of bytes: uvicorn reads with this parser."""

    def __init__(self) -> None:
        self.targets: list[bytes] = []
        self.body = b""
        self.parser = httptools.HttpRequestParser(self)

    def on_url(self, url: bytes) -> None:
        self.targets.append(url)

    def on_body(self, body: bytes) -> None:
        self.body += body


async def test_a_worker_reads_one_request_with_one_length_and_no_other_protocol(worker, tmp_path):
    reached = 0
    with GatewayForks(tmp_path) as fleet:
        gateway = await started(fleet.gateway(worker))
        for case in itertools.product(FIELDS.values(), ("POST", "DELETE", "GET"), (BODY, HIDDEN, b"")):
            fields, method, body = case
            connection = await Connection.open(gateway)
            await connection.send(request(method, CHAT, {"x-mock-id": "one", **fields}, body))
            await connection.response()
            connection.close()
            for number, seen in enumerate(worker.pop("one"), 1):
                assert number == 1 and not seen.headers.keys() & HOP_BY_HOP, case
                assert b"upgrade" not in seen.headers.get(b"connection", b"").lower(), case
                sent = b"".join(b"%b: %b\r\n" % field for field in seen.headers.items())
                read = Reader()
                read.parser.feed_data(b"%b %b HTTP/1.1\r\n%b\r\n%b" % (seen.method, seen.target, sent, seen.body))
                assert not read.parser.should_upgrade(), case
                assert (read.targets, read.body) == ([CHAT.encode()], seen.body), case
                reached += 1
    assert not worker.malformed and reached > len(FIELDS) * 9 / 2


@pytest.mark.thorough
async def test_honest_streams_survive_all_kinds_of_attacks(tmp_path):
    with GatewayForks(tmp_path) as fleet:
        found = await attacks.run(fleet, attackers=8, seconds=12.0)
    # How long they waited depends on the machine.
    found = dataclasses.replace(found, health_p99=0.0, late_most=0.0)
    quiet = dataclasses.replace(found, failed=0, health_failed=0, files_after=found.files_before, log=[])
    assert attacks.complaints(quiet, found, per_second=0.0) == []
    assert found.frames > 0 and sum(found.attacks.values()) > 0


@pytest.mark.thorough
async def test_the_gateway_benchmark_has_a_row_for_each_gateway_and_kind_of_traffic():
    report = await gateway_cost.run([], CASES, 8, 2, print)
    assert list(report.batches) == [DIRECT, SEAMARK, BARE]
    for name, batches in report.batches.items():
        assert {case: len(each) for case, each in batches.items()} == dict.fromkeys(CASES, 2)
        assert name == DIRECT or all(report.cpu(name, case).median > 20e-6 for case in CASES)
    assert report.renders == 0  # no request is rendered
