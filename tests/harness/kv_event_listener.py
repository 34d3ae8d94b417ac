"""Who listens to an engine's KV events over ZMQ, as llm-d does."""

from __future__ import annotations

import json
from typing import NamedTuple

import msgspec
import zmq

from tests.harness.kv_event_index import KvEventIndex

LAST = (2**64 - 1).to_bytes(8, "big")  # the number of what ends a replay


class Ports(NamedTuple):
    """Where a worker says what happens in its cache."""

    events: int
    replay: int

    @property
    def flags(self) -> tuple[str, ...]:
        """Of vLLM."""
        endpoint, replay = (f"tcp://*:{port}" for port in self)
        events = {"publisher": "zmq", "endpoint": endpoint, "replay_endpoint": replay, "topic": "kv@worker@model"}
        return ("--kv-events-config", json.dumps({"enable_kv_cache_events": True, **events}))


class Listener:
    """A subscriber to one worker's events, and the index that it keeps."""

    def __init__(self, ports: Ports, unit: int) -> None:
        """`unit`: length of the index's blocks in tokens."""
        context = zmq.Context.instance()
        self._live, self._replay = context.socket(zmq.SUB), context.socket(zmq.DEALER)
        self._live.setsockopt(zmq.SUBSCRIBE, b"kv@")
        self._live.connect(f"tcp://127.0.0.1:{ports.events}")
        self._replay.connect(f"tcp://127.0.0.1:{ports.replay}")
        self._unit = unit
        self.index = KvEventIndex(unit)
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
        index = KvEventIndex(self._unit)
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
