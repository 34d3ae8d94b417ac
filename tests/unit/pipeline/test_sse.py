"""Event streams: every byte arrives, in whole events, and what the gateway asked for itself does not."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterable
from typing import Any
from unittest.mock import Mock

import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai._streaming import SSEDecoder

from proxy.chat.usage import Usage
from proxy.metrics import Metrics
from proxy.pipeline import sse
from proxy.pipeline.sse import HEARTBEAT, Heartbeats, SseRelay, usage_in_stream
from tests.harness.virtual_time import on_virtual_time

DELTA = b'data: {"choices":[{"delta":{"content":"\xc3\xa9 \\"usage\\":{"}}]}\n\n'

USAGE = b'data: {"choices":[],"usage":{"prompt_tokens":9,"prompt_tokens_details":{"cached_tokens":0}}}\n\n'

DONE = b"data: [DONE]\n\n"

LAST = b'data: {"choices":[{"delta":{},"finish_reason":"stop"}]}\n\n'

STAMPED = b'data: {"choices":[{"delta":{},"finish_reason":"stop"}],"system_fingerprint":"vllm-1"}\n\n'

END = USAGE.replace(b"}}}", b'}},"system_fingerprint":"vllm-1"}') + DONE

BESIDE = USAGE.replace(b'"choices":[]', b'"choices":[{"index":0,"finish_reason":null}]')


class Worker:
    """An answer in pieces, to be run behind the first. A bit of `through`: that piece goes where it arrives."""

    def __init__(self, pieces: Iterable[bytes], through: int = 0, then: Callable[[], Any] | None = None) -> None:
        """Behind each, `then` is awaited."""
        self._pieces, self._through, self._then, self.sink = enumerate(pieces), through, then, None

    async def next_chunk(self) -> bytes:
        for number, piece in self._pieces:
            if self._then is not None and number:
                await self._then()
            if self.sink is None or not (self._through >> number & 1 and self.sink(piece)):
                return piece
        return b""


def relay_of(worker: Any, *more: Any) -> tuple[SseRelay, list[tuple[bytes, bool]]]:
    """And what it sends: bytes, and whether more comes. Every third time its client has no room."""
    sent: list[tuple[bytes, bool]] = []

    async def send(message) -> None:
        sent.append((message["body"], message.get("more_body", False)))

    has_room = itertools.cycle((False, True, True))
    served = Mock(is_writable=lambda: next(has_room), write_chunk=lambda piece: sent.append((piece, True)))
    return SseRelay(worker, send, served, *more), sent


async def relayed(pieces: list[bytes], strips: int = 0, through: int = 0) -> tuple[list[bytes], SseRelay]:
    relay, sent = relay_of(worker := Worker(pieces, through), strips, lambda _: None)
    await relay.run(await worker.next_chunk())
    await relay.finish()
    return [piece for piece, _ in sent if piece], relay


STREAMS = {  # with how many choices it ends where the gateway asked for usage, and what arrives if not all
    "usage that nobody asked for is taken out": (DELTA + LAST + USAGE + DONE, 1, DELTA + LAST + DONE),
    "asked for, it stays": (DELTA + LAST + USAGE + DONE, 0, None),
    "what vLLM moves into the usage event is put back": (DELTA + LAST + END, 1, DELTA + STAMPED + DONE),
    "several choices end one by one": (LAST + DELTA + LAST + END, 2, LAST + DELTA + STAMPED + DONE),
    # vLLM with --enable-force-include-usage reports it beside each choice, too.
    "usage of all clients stays": (BESIDE * 2 + BESIDE.replace(b"null", b'"stop"') + USAGE + DONE, 1, None),
    "half an object stays": (DELTA + b'data: {"choices":[],"usage":{"prompt_tokens"\n\n' + DONE, 1, None),
    "a comment stays": (DELTA + b': "usage"\n\n' + DONE, 1, None),
    "lines may end either way": (DELTA.replace(b"\n", b"\r\n") + DONE, 1, None),
    "what has no end comes at the end": (DELTA + b"data: x", 1, None),
}


@pytest.mark.parametrize("name", STREAMS)
@given(data=st.data())
def test_however_a_stream_is_cut_it_arrives_in_whole_events(name, data):
    stream, strips, expected = STREAMS[name]
    each = st.just(range(1, len(stream)))
    cuts = sorted(data.draw(each | st.sets(st.integers(1, len(stream) - 1), max_size=6), "cuts"))
    pieces = [stream[begin:end] for begin, end in zip([0, *cuts], [*cuts, len(stream)], strict=True)]
    sent, relay = asyncio.run(relayed(pieces, strips, data.draw(st.integers(0, 2 ** len(pieces)), "through")))
    assert b"".join(sent) == (expected or stream)
    assert relay.usage == (Usage(9, 0) if b'"prompt_tokens":9' in stream else None)
    assert all(piece.endswith((b"\n\n", b"\n\r\n")) for piece in sent[:-1])
    assert relay.is_complete is (DONE in stream)


async def test_no_choice_waits_for_the_end_of_the_last():
    sent, _ = await relayed([LAST, DELTA, LAST, END], strips=2)
    assert sent == [LAST, DELTA, STAMPED + DONE]


@pytest.mark.parametrize("ids", [b"id: 1\n%b", b"event: x\nid:1\n%b", b"retry: 9\r\nid: 1\r\n%b", b"%b"])
async def test_a_comment_is_no_empty_event_for_an_sdk(ids):
    """One behind an event with an id: `openai` makes an event of a blank line alone."""

    async def beat_twice() -> None:
        await relay.beat()
        await relay.beat()

    relay, told = relay_of(worker := Worker((ids % DELTA, DELTA, DELTA, DONE, b""), then=beat_twice))
    await relay.beat()
    await relay.run(await worker.next_chunk())
    await relay.finish(b"data: 1\n\n")
    sent = [piece for piece, _ in told]
    events = list(SSEDecoder().iter_bytes(iter([b"".join(sent)])))
    data = DELTA.decode().removeprefix("data: ").strip()
    assert [event.data for event in events] == [data, data, data, "[DONE]", "1"]
    assert sent.count(HEARTBEAT) == 9 == b"".join(sent).count(b": keep-alive\n")  # each is whole
    assert b"".join(sent).count(b"\n\n") == 5  # and adds no blank line


async def test_an_event_nested_beyond_reason_arrives_as_it_came():
    deep = b'data: {"usage":' + b"[" * 100_000 + b"]" * 100_000 + b"}\n\n"
    sent, relay = await relayed([deep, DONE], strips=True)
    assert b"".join(sent) == deep + DONE and relay.usage is None and relay.response is None
    sent, _ = await relayed([b"data: "] + [b"x" * 2**20] * 10)  # nor is one without end held for ever
    assert sum(map(len, sent)) == 10 * 2**20 + 6 and len(sent) > 1


@pytest.mark.parametrize("size", [1, 7, 50, 1000])
async def test_an_event_that_is_too_long_to_keep_goes_on_in_pieces(monkeypatch, size):
    monkeypatch.setattr(sse, "MAX_HELD_BYTES", 300)
    stream = DELTA + b"data: " + b"x" * 5000 + b"\n\n" + DELTA + USAGE + DONE
    sent, relay = await relayed([stream[at : at + size] for at in range(0, len(stream), size)], strips=1)
    assert b"".join(sent) == stream.replace(USAGE, b"") and relay.usage == Usage(9, 0)
    assert max(map(len, sent)) <= 300 + size
    assert size == 1000 or sum(len(piece) > 250 for piece in sent) == 1  # it is not collected again


@pytest.mark.parametrize(
    ("pieces", "end", "sent"),
    [
        ([], b"data: error\n\n", [b"data: error\n\n"]),
        ([b"data: " + b"x" * 30], b"data: error\n\n", [b"data: " + b"x" * 30, b"\n\ndata: error\n\n"]),
        ([b"data: " + b"x" * 30], b"", [b"data: " + b"x" * 30, b""]),
        ([b"data: [DONE]" + b"x" * 30, b"\n\n"], b"", [b"data: [DONE]" + b"x" * 30, b"\n\n", b""]),
    ],
)
async def test_behind_an_event_that_was_cut_the_end_of_a_stream_comes_behind_a_blank_line(
    monkeypatch, pieces, end, sent
):
    monkeypatch.setattr(sse, "MAX_HELD_BYTES", 20)
    relay, told = relay_of(worker := Worker(pieces))
    await relay.run(await worker.next_chunk())
    await relay.beat()
    beaten = [each for each in told if each == (HEARTBEAT, True)]
    assert len(beaten) == (not pieces or pieces[-1] == b"\n\n")  # no comment inside of an event
    await relay.finish(end)
    await relay.beat()  # it is over
    assert [each for each in told if each not in beaten] == [(each, each is not sent[-1]) for each in sent]
    assert not relay.is_complete


def test_the_last_usage_that_can_be_read_counts():
    assert usage_in_stream(USAGE + USAGE.replace(b":9,", b":10,") + DONE) == Usage(10, 0)
    assert usage_in_stream(USAGE + b'data: {"usage":null}\n\n') == Usage(9, 0)
    assert usage_in_stream(b'"usage"') is None


@on_virtual_time
async def test_a_stream_gets_a_comment_once_it_has_been_silent_for_the_interval():
    sent, may_send, loop = [], asyncio.Event(), asyncio.get_running_loop()
    may_send.set()

    async def send(message) -> None:
        sent.append(message["body"])
        await may_send.wait()

    metrics = Metrics()
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(sse.time, "monotonic", loop.time)
        beats, relay = Heartbeats(20.0, metrics.heartbeats), SseRelay(Mock(), send)
        running = asyncio.create_task(beats.run())
        beats.streams[relay] = Mock()
        for seconds, comments in ((19.9, 0), (0.2, 1), (10.0, 1), (10.0, 2)):  # a comment is a sign of life
            await asyncio.sleep(seconds)
            assert sent == [HEARTBEAT] * comments, loop.time()
        may_send.clear()
        await asyncio.sleep(100.0)
        assert len(sent) == 3  # its client takes nothing
        may_send.set()
        await asyncio.sleep(26.0)
        assert len(sent) == 4
        del beats.streams[relay]
        await asyncio.sleep(100.0)
        assert len(sent) == 4 == metrics.registry.get_sample_value("seamark_heartbeats_total")
        running.cancel()
