"""`python -m tests.bench.several_gateways DIR`: hits through 1 to 8 gateways, without and with Redis.

DIR as of `agent_traces`; each conversation has many users, whose first words differ. All is in memory, on a clock that
stands while the real Redis is asked. A worker computes one prompt at a time, and finds what a limited LRU has kept.
"""

import asyncio
import bisect
import itertools
import json
import random
import sys
import tempfile
from collections import OrderedDict
from contextlib import AsyncExitStack
from pathlib import Path
from unittest import mock

from redis.asyncio.client import Pipeline

from proxy.bench.harness.servers import Servers, free_port
from proxy.chat.chat import CHAT
from proxy.fleet.worker import Load
from proxy.idle_work import IdleWork
from tests.bench.agent_traces import conversations
from tests.harness.fake_engine import MATCH_UNIT, Computed
from tests.harness.in_memory_gateway import in_memory_gateway
from tests.harness.recording_worker import RecordingWorker
from tests.harness.virtual_time import VirtualTimeLoop

WORKERS, ROOM, TOKENS_A_SECOND = 4, 350_000, 100_000  # room in each cache, in tokens
REQUESTS, USERS, PAUSE = 600, 40, 0.4  # of a run; at once; seconds between an answer and the next turn, on the average


class Worker(RecordingWorker):
    """`kept`: the match units that its cache has, the next to go first, each with the name of the state at its end."""

    def __init__(self, finds, seen):
        super().__init__(computed=Computed(1))
        self.finds, self.seen, self.computing, self.kept = finds, seen, asyncio.Lock(), OrderedDict()

    async def _answer(self, request, receive, send):
        prompt = self.template(request.fields)
        units = (prompt[at : at + MATCH_UNIT] for at in range(0, len(prompt) - MATCH_UNIT, MATCH_UNIT))
        names = list(itertools.accumulate(units, lambda name, unit: hash((name, unit)), initial=0))[1:]
        shared = bisect.bisect_left(names, True, key=lambda name: name not in self.seen) * MATCH_UNIT
        self.seen.update(names)
        async with self.computing:
            self.cached = max((at for at, name in enumerate(names, 1) if self.kept.get(name)), default=0) * MATCH_UNIT
            await asyncio.sleep((len(prompt) - self.cached) / TOKENS_A_SECOND)
            self.finds.append((min(shared, self.cached), shared))
            await super()._answer(request, receive, send)
            told = self.engine._kept[-1]
            came = {at // MATCH_UNIT: name for at, name in told[3]} if told[0] == "came" else {}
            for at in range(len(names), 0, -1):  # what others share is the last to go
                self.kept[names[at - 1]] = self.kept.pop(names[at - 1], None) or came.get(at)
            while len(self.kept) > ROOM // MATCH_UNIT:
                if state := self.kept.popitem(last=False)[1]:
                    self.engine._kept.append(["gone", state])


def now():
    return asyncio.get_running_loop().time()


async def ask(pipeline, execute=Pipeline.execute):
    asyncio.get_running_loop().asked += 1
    try:
        return await execute(pipeline)
    finally:
        asyncio.get_running_loop().asked -= 1


async def measure(known, count, redis):
    """Tokens found of those that could be, the first quarter of all requests left out."""
    finds, seen, numbers, drawn = [], set(), itertools.count(), random.Random(1)
    workers, settings = [Worker(finds, seen) for _ in range(WORKERS)], {"health_interval": 5, "redis": redis}
    async with AsyncExitStack() as stack:
        fleet = [await stack.enter_async_context(in_memory_gateway(*workers, **settings)) for _ in range(count)]

        async def use():
            while len(finds) < REQUESTS:
                for turn in known[(number := next(numbers)) % len(known)]:
                    body, own = json.loads(turn), drawn.choice(fleet)
                    first = next(message for message in body["messages"] if message["role"] == "user")
                    first["content"] = f"{number} {first['content']}"
                    for at, worker in enumerate(own.gateway.pool.workers):  # as its plugin tells
                        others = [other.gateway.pool.workers[at] for other in fleet if other is not own]
                        worker.others = Load(sum(o.inflight for o in others), sum(o.prefill_tokens for o in others))
                    (await own.client.post(CHAT, json=body)).raise_for_status()
                    await asyncio.sleep(drawn.expovariate(1 / PAUSE))

        await asyncio.gather(*(use() for _ in range(USERS)))
    return sum(found for found, _ in finds[REQUESTS // 4 :]) / sum(shared for _, shared in finds[REQUESTS // 4 :])


def main():
    known = conversations(Path(sys.argv[1]))
    IdleWork.__init__.__defaults__ = (now, *IdleWork.__init__.__defaults__[1:])
    clock, asked = mock.patch("time.monotonic", now), mock.patch.object(Pipeline, "execute", ask)
    for count, has_redis in itertools.product((1, 2, 4, 8), (False, True)):
        port = str(free_port())
        with tempfile.TemporaryDirectory() as folder, Servers(Path(folder)) as servers:
            servers.start("redis", int(port), ["redis-server", "--save", "", "--bind", "127.0.0.1", "--port", port], {})
            with clock, asked, asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
                share = runner.run(measure(known, count, f"redis://127.0.0.1:{port}" if has_redis else None))
        print(count, "with Redis" if has_redis else "alone", f"{share:.3f}", flush=True)


if __name__ == "__main__":
    main()
