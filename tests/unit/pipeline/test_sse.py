"""Event streams: every byte arrives, in whole events, and what the gateway asked for itself does not."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from openai._streaming import SSEDecoder

from proxy.chat.usage import Usage
from proxy.pipeline import sse
from proxy.pipeline.sse import HEARTBEAT, HEARTBEAT_BEHIND_IDS, Heartbeats, SseRelay, usage_in_stream

DELTA = b'data: {"choices":[{"delta":{"content":"\xc3\xa9 \\"usage\\":{"}}]}\n\n'

USAGE = b'data: {"choices":[],"usage":{"prompt_tokens":9,"prompt_tokens_details":{"cached_tokens":0}}}\n\n'

DONE = b"data: [DONE]\n\n"


async def relayed(pieces: list[bytes], strips: int = 0) -> tuple[list[bytes], SseRelay]:
    sent: list[bytes] = []

    async def send(message) -> None:
        sent.append(message["body"])

    async def chunks():
        for piece in pieces:
            yield piece

    relay = SseRelay(send, strips, opened=lambda _: None)
    await relay.run(chunks())
    await relay.finish()
    return [piece for piece in sent if piece], relay


LAST = b'data: {"choices":[{"delta":{},"finish_reason":"stop"}]}\n\n'

STAMPED = b'data: {"choices":[{"delta":{},"finish_reason":"stop"}],"system_fingerprint":"vllm-1"}\n\n'


@pytest.mark.parametrize("size", [1, 7, 50, 10_000])
async def test_what_vllm_moves_into_the_usage_event_is_put_back(size):
    usage = USAGE.replace(b"}}}", b'}},"system_fingerprint":"vllm-1"}')
    stream = DELTA + LAST + usage + DONE
    sent, relay = await relayed([stream[at : at + size] for at in range(0, len(stream), size)], strips=True)
    assert b"".join(sent) == DELTA + STAMPED + DONE
    assert relay.usage == Usage(9, 0)


@pytest.mark.parametrize("size", [1, 7, 50, 10_000])
async def test_usage_that_a_worker_gives_all_clients_stays(size):
    """vLLM with `--enable-force-include-usage` reports it beside each choice, too; nobody has asked for that."""
    beside = USAGE.replace(b'"choices":[]', b'"choices":[{"index":0,"finish_reason":null}]')
    last = beside.replace(b"null", b'"stop"')
    stream = beside * 2 + last + USAGE + DONE
    sent, relay = await relayed([stream[at : at + size] for at in range(0, len(stream), size)], strips=True)
    assert b"".join(sent) == stream and relay.usage == Usage(9, 0)


@pytest.mark.parametrize("size", [1, 7, 50, 10_000])
async def test_several_choices_end_one_by_one_and_none_waits_for_the_last(size):
    end = USAGE.replace(b"}}}", b'}},"system_fingerprint":"vllm-1"}') + DONE
    sent, _ = await relayed([LAST, DELTA, LAST, end], strips=2)
    assert sent == [LAST, DELTA, STAMPED + DONE]
    stream = LAST + DELTA + LAST + end
    sent, relay = await relayed([stream[at : at + size] for at in range(0, len(stream), size)], strips=2)
    assert b"".join(sent).endswith(DELTA + STAMPED + DONE) and relay.usage == Usage(9, 0)


@pytest.mark.parametrize("size", [1, 7, 10_000])
@pytest.mark.parametrize(
    "event", [b'data: {"choices":[],"usage":{"prompt_tokens"\n\n', b': "usage"\n\n', b'data: ["usage"]\n\n']
)
async def test_an_event_that_is_not_what_it_looks_like_stays(event, size):
    stream = DELTA + event + DONE
    sent, relay = await relayed([stream[at : at + size] for at in range(0, len(stream), size)], strips=True)
    assert b"".join(sent) == stream and relay.usage is None


@pytest.mark.parametrize("ids", [b"id: 1\n%b", b"event: x\nid:1\n%b", b"retry: 9\r\nid: 1\r\n%b", b"%b"])
async def test_a_comment_is_no_empty_event_for_an_sdk(ids):
    """One behind an event with an id: `openai` makes an event of a blank line alone."""
    sent: list[bytes] = []

    async def send(message) -> None:
        sent.append(message["body"])

    async def chunks():
        await relay.beat()
        for event in (ids % DELTA, DELTA, DELTA, DONE):
            yield event
            await relay.beat()
            await relay.beat()

    relay = SseRelay(send)
    await relay.run(chunks())
    await relay.finish(b"data: 1\n\n")
    events = list(SSEDecoder().iter_bytes(iter([b"".join(sent)])))
    data = DELTA.decode().removeprefix("data: ").strip()
    assert [event.data for event in events] == [data, data, data, "[DONE]", "1"]
    assert b"".join(sent).count(b": keep-alive\n") == 9


async def test_an_event_that_a_client_has_not_taken_does_not_complete_its_stream():
    async def send(message) -> None:
        if message["body"] == DONE:
            raise asyncio.CancelledError

    async def chunks():
        yield DELTA
        yield DONE

    relay = SseRelay(send)
    with pytest.raises(asyncio.CancelledError):
        await relay.run(chunks())
    assert not relay.is_complete


async def test_an_event_without_end_is_not_held_for_ever():
    sent, _ = await relayed([b"data: "] + [b"x" * 2**20] * 10)
    assert sum(map(len, sent)) == 10 * 2**20 + 6 and len(sent) > 1


async def test_an_event_nested_beyond_reason_arrives_as_it_came():
    deep = b'data: {"usage":' + b"[" * 100_000 + b"]" * 100_000 + b"}\n\n"
    sent, relay = await relayed([deep, DONE], strips=True)
    assert b"".join(sent) == deep + DONE
    assert relay.usage is None and relay.response is None


async def test_the_end_of_a_stream_comes_behind_a_blank_line_if_an_event_was_cut():
    sent: list[Any] = []

    async def send(message) -> None:
        sent.append((message["body"], message.get("more_body", False)))

    relay = SseRelay(send)
    await relay.finish(b"data: error\n\n")
    assert sent == [(b"data: error\n\n", False)]
    await relay.beat()
    assert len(sent) == 1  # it is over
    cut = SseRelay(send)
    await cut._pass_on(b"data: half")
    await cut.beat()
    await cut.finish(b"data: error\n\n")
    assert sent[1:] == [(b"data: half", True), (b"\n\ndata: error\n\n", False)]
    plain = SseRelay(send)
    await plain._pass_on(b"data: half")
    await plain.finish()
    assert sent[-1] == (b"", False)


async def test_a_stream_that_is_cut_in_its_last_event_is_not_complete(monkeypatch):
    monkeypatch.setattr(sse, "MAX_HELD_BYTES", 20)
    _, relay = await relayed([DELTA, b"data: [DONE]" + b"x" * 100])
    assert not relay.is_complete
    _, relay = await relayed([DELTA, b"data: [DONE]" + b"x" * 100, b"\n\n"])
    assert not relay.is_complete  # nor by the rest of one alone


@pytest.mark.parametrize(
    ("events", "usage"),
    [
        (USAGE + DONE, Usage(9, 0)),
        (USAGE.replace(b"data: ", b"data:"), Usage(9, 0)),
        (USAGE + USAGE.replace(b":9,", b":10,") + DONE, Usage(10, 0)),
        (USAGE + b'data: {"usage":null}\n\n', Usage(9, 0)),
        (USAGE + b'data: {"usage":\n\n', Usage(9, 0)),
        (USAGE + b': "usage"\n\n', Usage(9, 0)),
        (b'"usage"', None),
        (DELTA, None),
        (b"", None),
    ],
)
def test_the_last_usage_that_can_be_read_counts(events, usage):
    assert usage_in_stream(events) == usage


class Clock:
    """Time that passes when a test says so."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now


async def test_a_stream_gets_a_comment_once_it_has_been_silent_for_the_interval(monkeypatch):
    clock, slept, sent, turns = Clock(), [], [], asyncio.Event()

    async def sleep(seconds: float) -> None:
        slept.append(seconds)
        await turns.wait()
        turns.clear()

    monkeypatch.setattr(sse, "time", clock)
    monkeypatch.setattr(sse, "asyncio", SimpleNamespace(sleep=sleep, create_task=asyncio.create_task))
    may_send = asyncio.Event()
    may_send.set()

    async def send(message) -> None:
        sent.append(message["body"])
        await may_send.wait()

    async def after(seconds: float) -> int:
        """The comments so far, so many seconds later."""
        clock.now += seconds
        turns.set()
        for _ in range(10):
            await asyncio.sleep(0)
        return len(sent)

    counted = Mock()
    beats = Heartbeats(20.0, counted)
    relay = SseRelay(send)
    running = asyncio.create_task(beats.run())
    with beats.watching(relay):
        assert await after(0) == 0 and slept[0] == 5.0
        assert await after(19.5) == 0
        assert await after(0.5) == 1 and sent == [HEARTBEAT]
        assert await after(10.0) == 1  # that was a sign of life
        assert await after(10.0) == 2
        may_send.clear()
        assert await after(20.0) == 3
        assert await after(20.0) == 3 and counted.inc.call_count == 3  # its client takes nothing
        await relay.beat()
        assert len(sent) == 3
        may_send.set()
        for _ in range(5):
            await asyncio.sleep(0)
        assert await after(10.0) == 3
        assert await after(10.0) == 4
    assert await after(100.0) == 4
    with pytest.raises(ZeroDivisionError), beats.watching(relay):
        raise ZeroDivisionError
    assert await after(100.0) == 4 and counted.inc.call_count == 4 and not beats._beats
    running.cancel()


async def test_a_comment_behind_ids_is_whole_and_another_may_follow():
    sent: list[bytes] = []

    async def send(message) -> None:
        sent.append(message["body"])

    async def chunks():
        yield b"id: 1\n" + DELTA

    relay = SseRelay(send)
    await relay.run(chunks())
    for _ in range(2):
        await relay.beat()
    await relay.finish(b"data: 1\n\n")
    assert sent[1:] == [HEARTBEAT_BEHIND_IDS] * 2 + [b"data: 1\n\n"]
