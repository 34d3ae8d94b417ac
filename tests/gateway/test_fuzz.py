"""Some of `python -m tests.bench.fuzz`, and that it would notice."""

from __future__ import annotations

import asyncio
import itertools
import json
import re
from types import SimpleNamespace

import pytest

from tests.bench import fuzz_framing
from tests.bench.fuzz import GATEWAY_FLAGS, Failure, Fuzzed, Run, fuzz, render
from tests.bench.fuzz_cases import ANSWERED, REFUSED, Case, Sent, case, complaint, name_of, same_body
from tests.harness.forked_gateways import GatewayForks
from tests.harness.leaving_clients import started
from tests.harness.raw_http import request
from tests.harness.raw_worker import RawWorker, Seen, head_of


@pytest.mark.parametrize("cases", [200, pytest.param(2000, marks=pytest.mark.thorough)])
async def test_nothing_breaks_at_broken_requests(tmp_path, cases):
    with GatewayForks(tmp_path) as fleet:
        rare = next(number for number in itertools.count() if case(1, number).kind == "at a limit")
        result = await fuzz(fleet, seed=1, seconds=0, only=sorted({*range(cases), rare}))
    print(render(result))
    assert result.held, render(result)
    kinds = {"well framed", "pipelined", "ambiguous", "odd", "mutated", "half", "at a limit"}
    assert kinds <= set(result.kinds)
    assert min(result.reached, result.statuses[200]) > cases / 2 and result.statuses[400] > cases / 20


async def test_no_ambiguous_request_gets_past_the_gateway(tmp_path):
    async with RawWorker() as worker:
        with GatewayForks(tmp_path) as fleet:
            run = Run(await started(fleet.gateway(worker, flags=GATEWAY_FLAGS)), worker, 0)
            for number, (wrong, data) in enumerate(fuzz_framing.ambiguous("").items()):
                data = fuzz_framing.ambiguous(name_of(0, number))[wrong]
                assert await run.judged(Case(number, wrong, REFUSED, [data])) == "", wrong
            assert await run.left_behind() == []
            assert not worker.seen.keys() - {"last"}


async def test_a_gateway_that_passes_everything_on_is_told(tmp_path):
    """A pipe in its place, which of two ways to frame a request takes one."""
    (tmp_path / "log").write_text("")

    async def pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        from_worker, to_worker = await asyncio.open_connection("127.0.0.1", int(worker.url.rsplit(":", 1)[1]))
        await asyncio.gather(piped(reader, to_worker), piped(from_worker, writer))

    async with RawWorker() as worker:
        pipe = await asyncio.start_server(pass_on, "127.0.0.1", 0)
        url = f"http://127.0.0.1:{pipe.sockets[0].getsockname()[1]}"
        process = SimpleNamespace(poll=lambda: None)
        run = Run(SimpleNamespace(url=url, process=process, log=tmp_path / "log", name="pipe"), worker, 0)
        whys = []
        for number, wrong in enumerate(fuzz_framing.ambiguous("")):
            data = fuzz_framing.ambiguous(name_of(0, number))[wrong]
            whys.append(await run.judged(Case(number, wrong, REFUSED, [data])))
        assert any("hidden inside reached" in why for why in whys)
        assert any("it is ambiguous, and reached" in why for why in whys)
        assert any("what is no request" in wrong for wrong in await run.left_behind())
        pipe.close()


async def piped(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(65536):
        data = data.replace(b"transfer-encoding: chunked\r\n", b"")
        writer.write(re.sub(rb"(content-length: 0\r\n)content-length: \d+\r\n", rb"\1", data))
    writer.close()


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (b"HTTP/1.1 500 Oh\r\ncontent-length: 0\r\n\r\n", "a 500 of the gateway's own"),
        (b"HTTP/1.1 500 Oh\r\ncontent-length: 0\r\nx-mock: answer\r\n\r\n", "the worker got it 0 times"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\n", "cut off"),
        (b"", "was not answered"),
    ],
)
async def test_each_wrong_answer_is_told(answer, why):
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answer)
        writer.close()

    async with RawWorker() as worker:
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        run = Run(SimpleNamespace(url=f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"), worker, 0)
        sent = Sent("a", "GET", "/v1/x", b"")
        told = await run.judged(Case(0, "well framed", ANSWERED, [request("GET", "/v1/x", {})], [sent]))
        assert why in told
        server.close()


def test_a_case_is_determined_by_seed_and_number():
    cases = [case(3, number) for number in range(200)]
    assert cases == [case(3, number) for number in range(200)]
    assert cases[:50] != [case(4, number) for number in range(50)]
    failed = Fuzzed(3, 1.0, {}, {}, 0, [Failure(cases[7], "why not")], ["an error"], 0.0, 0.0)
    assert not failed.held and "--seed 3 --case 7" in render(failed) and "why not" in render(failed)


@pytest.mark.parametrize(
    ("sent", "seen", "same"),
    [
        (b'{"a":1}', b'{"a":1}', True),
        (b'{"a":1}', b'{"a":1,"vllm_xargs":{"seamark_boundaries":[16,32]}}', True),
        (b'{"a":1e2}', b'{"a":1e2,"vllm_xargs":{"seamark_boundaries":[16,"last-2:5,6",-3]}}', True),
        (b'{"a":1,"vllm_xargs":null}', b'{"a":1,"vllm_xargs":{"seamark_boundaries":[]}}', True),
        ('{"a":"é"}'.encode("utf-16"), '{"a":"é"}'.encode(), True),
        (b"\xef\xbb\xbfnot json", b"not json", True),
        (b'{"a":1}', b'{"a":2}', False),
        (b"not json", b"not jso", False),
        (b'{"a":NaN}', b'{"a":null}', False),
    ],
)
def test_a_body_is_the_same_but_for_the_hint_and_the_encoding(sent, seen, same):
    assert same_body(sent, seen) is same
    arrived = Seen(b"POST", b"/v1/x%20y", {}, seen, 1)
    assert bool(complaint(Sent("a", "POST", "/v1/x%20y", sent), arrived)) is not same
    assert complaint(Sent("a", "GET", "/v1/x%20y", sent), arrived) and complaint(
        Sent("a", "POST", "/v1", sent), arrived
    )


@pytest.mark.parametrize("wrong", ["length and chunked", "two lengths", "chunk size with 0x", "bare line feeds"])
def test_the_raw_worker_takes_http_by_the_letter(wrong):
    with pytest.raises(ValueError, match=r"framed more than once|chunked, although|request line"):
        head_of(fuzz_framing.ambiguous("x")[wrong].replace(b"\n\n", b"\r\n\r\n"))


@pytest.mark.parametrize("path", ["/v1/rerank", "/v1/chat/completions"])
async def test_a_body_in_utf_16_is_answered_whatever_it_is_called(tmp_path, path):
    """Found by fuzzing: what is read as UTF-16 must be changed as UTF-16 too, or not at all."""
    body = {"model": "m", "messages": [], "stream": True, "cache_salt": "x", "kv_transfer_params": {"a": 1}}
    raw = json.dumps(body).encode("utf-16")
    async with RawWorker() as worker:
        with GatewayForks(tmp_path) as fleet:
            run = Run(await started(fleet.gateway(worker)), worker, 0)
            sent = Sent("utf-16", "POST", path, raw)
            headers = {"content-type": "text/plain; charset=utf-16", "x-mock-id": sent.name}
            data = request(sent.method, sent.target, headers, raw)
            assert await run.judged(Case(0, "well framed", ANSWERED, [data], [sent])) == ""
