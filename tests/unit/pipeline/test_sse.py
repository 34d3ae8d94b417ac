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
from proxy.pipeline.sse import HEARTBEAT, HEARTBEAT_BEHIND_IDS, Heartbeats, SseRelay, data_of_last, usage_in_stream

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


@pytest.mark.parametrize("size", [1, 7, 50, 10_000])
async def test_however_it_is_cut_only_whole_events_go_on(size):
    stream = DELTA * 3 + USAGE + DONE
    sent, relay = await relayed([stream[at : at + size] for at in range(0, len(stream), size)])
    assert b"".join(sent) == stream
    assert all(piece.endswith(b"\n\n") for piece in sent)
    assert relay.usage == Usage(9, 0) and relay.first == DELTA


@pytest.mark.parametrize("size", [1, 7, 50, 10_000])
async def test_usage_that_nobody_asked_for_is_taken_out_and_read(size):
    stream = DELTA * 3 + USAGE + DONE
    sent, relay = await relayed([stream[at : at + size] for at in range(0, len(stream), size)], strips=True)
    assert b"".join(sent) == DELTA * 3 + DONE
    assert relay.usage == Usage(9, 0)


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
async def test_a_last_event_without_usage_behind_it_is_not_lost(size):
    stream = DELTA + LAST
    sent, _ = await relayed([stream[at : at + size] for at in range(0, len(stream), size)], strips=True)
    assert b"".join(sent) == stream


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


async def test_while_an_event_is_held_back_the_stream_stands_at_the_end_of_another():
    sent: list[bytes] = []

    async def send(message) -> None:
        sent.append(message["body"])

    async def chunks():
        yield DELTA
        yield DELTA[:9]

    relay = SseRelay(send, opened=lambda _: None)
    await relay.run(chunks())
    await relay.beat()
    assert sent == [DELTA, HEARTBEAT] and relay.last == DELTA


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


@pytest.mark.parametrize("size", [1, 7, 50, 10_000])
@pytest.mark.parametrize(
    ("last", "complete"),
    [
        (DONE, True),
        (b'event: message_stop\ndata: {"type":"message_stop"}\n\n', True),
        (b'event: response.completed\r\ndata: {"type":"response.completed"}\r\n\r\n', True),
        (b'event: response.incomplete\ndata: {"type":"response.incomplete"}\n\n', True),
        (LAST, False),
        (b'event: message_delta\ndata: {"type":"message_delta"}\n\n', False),
        (DELTA.replace(b"\xc3\xa9", b"data: [DONE]"), False),
        (DONE[:-1], False),
    ],
)
async def test_a_stream_is_complete_with_the_last_event_of_its_api(last, complete, size):
    stream = DELTA + last
    _, relay = await relayed([stream[at : at + size] for at in range(0, len(stream), size)])
    assert relay.is_complete == complete


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


async def test_lines_may_end_either_way_and_what_has_no_end_comes_at_the_end():
    stream = b"data: 1\r\n\r\ndata: 2\r\n\r\ndata: 3"
    sent, _ = await relayed([stream[at : at + 5] for at in range(0, len(stream), 5)])
    assert b"".join(sent) == stream


async def test_an_event_without_end_is_not_held_for_ever():
    sent, _ = await relayed([b"data: "] + [b"x" * 2**20] * 10)
    assert sum(map(len, sent)) == 10 * 2**20 + 6 and len(sent) > 1


async def test_an_event_nested_beyond_reason_arrives_as_it_came():
    deep = b'data: {"usage":' + b"[" * 100_000 + b"]" * 100_000 + b"}\n\n"
    sent, relay = await relayed([deep, DONE], strips=True)
    assert b"".join(sent) == deep + DONE
    assert relay.usage is None and relay.response is None


@pytest.mark.parametrize("size", [1, 3, 1000])
@pytest.mark.parametrize("strips", [True, False])
async def test_an_event_that_is_too_long_to_keep_goes_on_in_pieces(monkeypatch, size, strips):
    monkeypatch.setattr(sse, "MAX_HELD_BYTES", 300)
    stream = DELTA + b"data: " + b"x" * 5000 + b"\n\n" + DELTA + USAGE + DONE
    sent, relay = await relayed([stream[at : at + size] for at in range(0, len(stream), size)], strips)
    assert b"".join(sent) == (stream.replace(USAGE, b"") if strips else stream)
    assert relay.usage == Usage(9, 0)
    assert max(map(len, sent)) <= 300 + size
    assert size == 1000 or sum(len(piece) > 250 for piece in sent) == 1  # it is not collected again


async def test_a_stream_begins_once_with_its_first_piece():
    begun = Mock()

    async def send(_: Any) -> None:
        """Nobody looks at it."""

    async def chunks(*pieces: bytes):
        for piece in pieces:
            yield piece

    await SseRelay(send).run(chunks(), begun)
    assert not begun.called
    await SseRelay(send).run(chunks(DELTA[:5], DELTA[5:], DONE), begun)
    begun.assert_called_once_with()


async def test_the_first_event_is_told_before_it_is_sent_and_once():
    order: list[Any] = []

    async def send(message) -> None:
        order.append(message["body"])

    async def chunks():
        yield DELTA[:9]
        yield DELTA[9:] + LAST
        yield DONE

    relay = SseRelay(send, opened=order.append)
    await relay.run(chunks())
    assert order == [DELTA, DELTA + LAST, DONE] and (relay.first, relay.last) == (DELTA, DONE)
    kept = SseRelay(send)
    await kept.run(chunks())
    assert (kept.first, kept.last) == (b"", b"")


async def test_lines_that_end_either_way_are_told_apart_in_one_piece():
    one, other = b"data: 1\n\n", b"data: 2\r\n\r\n"
    for stream in (one + other, other + one, one + other + one, other + one + other):
        sent, relay = await relayed([stream + b"data: half"])
        assert sent == [stream, b"data: half"]
        assert relay.first == (one if stream.startswith(one) else other)


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
    ("events", "data"),
    [
        (b'data:{"a":1}\n\n', {"a": 1}),
        (b'data: {"a":1}\n\ndata: {"a":2}\n\n', {"a": 2}),
        (b'data: {"a":1}\n\n: comment\n\n', {"a": 1}),
        (b'data: {"a":1}\n\ndata: [2]\n\n', {}),
        (b'data: {"a":1}\n\ndata: {\n\n', {}),
        (b": comment\n\n", {}),
        (b"", {}),
    ],
)
def test_the_last_data_counts_and_nothing_but_an_object(events, data):
    assert data_of_last(events) == data


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


async def test_a_response_is_that_of_the_last_event_that_has_one():
    created, last = b'data: {"response":{"id":"r"}}\n\n', b'data: {"response":{"id":"r","status":"completed"}}\n\n'
    for pieces, status in (([created, DELTA], None), ([created, last], "completed")):
        _, relay = await relayed(pieces)
        assert relay.response == ({"id": "r"} if status is None else {"id": "r", "status": status})
    _, relay = await relayed([DELTA])
    assert relay.response is None


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


async def test_without_an_interval_there_are_no_comments():
    await Heartbeats(0, Mock()).run()


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
