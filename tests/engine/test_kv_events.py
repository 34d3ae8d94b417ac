"""An index built from a real engine's KV events, over ZMQ as llm-d listens, promises what the engine then finds."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator

import httpx
import msgspec
import pytest
import zmq

from proxy.bench.harness.client import fresh_tokens, open_client, request
from proxy.bench.harness.servers import Server, generated_model
from proxy.commands.render_server import free_port
from tests.harness.kv_event_index import KvEventIndex
from tests.harness.waiting import until

UNIT = 16

HEADS = [fresh_tokens(length, "head", length) for length in (250, 390, 520, 800, 1000)]

PROMPTS = 60

LAST = (2**64 - 1).to_bytes(8, "big")  # the number of what ends a replay


class Listener:
    """A subscriber to one worker's events, and the index that it keeps."""

    def __init__(self, port: int, replay_port: int) -> None:
        context = zmq.Context.instance()
        self._live, self._replay = context.socket(zmq.SUB), context.socket(zmq.DEALER)
        self._live.setsockopt(zmq.SUBSCRIBE, b"kv@")
        self._live.connect(f"tcp://127.0.0.1:{port}")
        self._replay.connect(f"tcp://127.0.0.1:{replay_port}")
        self.index = KvEventIndex(UNIT)
        self.numbers: list[int] = []
        self.removed = 0  # blocks

    def close(self) -> None:
        for socket in (self._live, self._replay):
            socket.close(linger=0)

    def hear(self) -> None:
        """Take what has arrived."""
        while self._live.poll(0):
            _, number, batch = self._live.recv_multipart()
            self.numbers.append(int.from_bytes(number, "big"))
            self._apply(self.index, batch)
            events = msgspec.msgpack.decode(batch)[1]
            self.removed += sum(len(event["block_hashes"]) for event in events if event["type"] == "BlockRemoved")

    def replayed(self) -> KvEventIndex:
        """An index built from what the worker remembers."""
        index = KvEventIndex(UNIT)
        self._replay.send_multipart([b"", (0).to_bytes(8, "big")])
        while True:
            assert self._replay.poll(30_000), "no answer to a request for a replay"
            *_, number, batch = self._replay.recv_multipart()
            if number == LAST:
                return index
            self._apply(index, batch)

    @staticmethod
    def _apply(index: KvEventIndex, batch: bytes) -> None:
        for event in msgspec.msgpack.decode(batch)[1]:
            index.apply(event)


@pytest.fixture
def ports() -> tuple[int, int]:
    """Of the events, and of their replay."""
    return free_port(), free_port()


@pytest.fixture
def listener(ports: tuple[int, int]) -> Iterator[Listener]:
    started = Listener(*ports)
    yield started
    started.close()


def flags_of(ports: tuple[int, int]) -> tuple[str, ...]:
    endpoint, replay = (f"tcp://*:{port}" for port in ports)
    events = {"publisher": "zmq", "endpoint": endpoint, "replay_endpoint": replay, "topic": "kv@worker@model"}
    config = json.dumps({"enable_kv_cache_events": True, **events})
    return ("--kv-events-config", config, "--num-gpu-blocks-override", "64", "--max-num-batched-tokens", "1024")


async def test_an_index_promises_what_the_engine_then_finds(fleet, ports, listener):
    engine: Server = fleet.engine(
        "events", generated_model(print), flags=flags_of(ports), environment={"VLLM_SERVER_DEV_MODE": "1"}
    )
    engine.wait_until_ready()
    index = listener.index
    async with open_client() as client:
        markers = itertools.count()

        async def heard() -> None:
            """All events up to now have arrived: those of one more prompt have."""
            marker = fresh_tokens(200, "marker", next(markers))
            await request(client, engine.url, marker, 1, [192])
            await until(lambda: _hears(listener, marker))

        await first_heard(client, engine, listener)
        await reset(client, engine)
        await heard()
        index.surprises.clear()

        exact, tokens = 0, 0
        for number in range(PROMPTS):
            again = number % 2 == 1
            own = number // 2 - (number > 1 and again)  # each prompt twice, with another one between
            head = HEADS[(own * own + own // 7) % len(HEADS)]
            prompt = [*head, *fresh_tokens(150, "own", own)]
            await heard()
            promised = index.promised(prompt[:-1])
            found = (await request(client, engine.url, prompt, 2, [len(head), len(prompt) - 4])).cached_tokens
            # Who leaves a prefix before its state, since that of the head alone is gone, finds less than is announced.
            assert promised == found if again else promised >= found
            exact, tokens = exact + (promised == found), tokens + found
        assert exact > 0.9 * PROMPTS and tokens > 5000
        assert listener.removed > 100 and not index.surprises

        unhinted = fresh_tokens(500, "unhinted")
        await request(client, engine.url, unhinted, 1)
        await heard()
        promised = index.promised(unhinted[:-1])
        assert promised == (await request(client, engine.url, unhinted, 1)).cached_tokens == 496

        await reset(client, engine)
        await heard()
        assert not any(index.promised(head) for head in HEADS)
        await request(client, engine.url, HEADS[0], 1, [240])
        await heard()
        assert index.promised(HEADS[0]) == 240 and not index.surprises
        assert listener.numbers == list(range(listener.numbers[0], listener.numbers[0] + len(listener.numbers)))
        assert listener.replayed().held == index.held


def _hears(listener: Listener, prompt: list[int]) -> bool:
    listener.hear()
    return listener.index.promised(prompt) >= 192


async def first_heard(client: httpx.AsyncClient, engine: Server, listener: Listener) -> None:
    """A subscriber that connects misses what was published before."""
    for number in itertools.count():
        await request(client, engine.url, fresh_tokens(200, "first", number), 1, [192])
        listener.hear()
        if listener.numbers:
            return
        assert number < 300, "no event in 300 prompts"


async def reset(client: httpx.AsyncClient, engine: Server) -> None:
    async def emptied() -> bool:
        return bool((await client.post(engine.url + "/reset_prefix_cache")).json()["success"])

    await until(emptied)
