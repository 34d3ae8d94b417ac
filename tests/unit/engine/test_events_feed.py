"""What readers of a feed are told of requests and states: each thing once, in its order, and what they lost."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from engine_patches.reporting import events_api
from engine_patches.reporting.events_api import Feed, Feeds, client_id
from engine_patches.reporting.report import EngineReport
from engine_patches.scheduler.counters import AdmittedRequest, DraftedRequest
from engine_patches.scheduler.load import GatewayLoad
from tests.harness.virtual_time import VirtualTimeLoop


def admitted(name="a", reason="cold", hit_tokens=0, shared=0, resolved=()):
    return AdmittedRequest(f"chatcmpl-{name}-00000000", reason, hit_tokens, shared, resolved)


def reported(engine: int = 0, engines: int = 1, **more: Any) -> EngineReport:
    return EngineReport(engine=engine, engines=engines, match_unit=16, block_size=384, **more)


def on_virtual_time(scenario: Any) -> Any:
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(scenario)


KEPT, TOLD = 6, 4  # in place of thousands


class Reading(RuleBasedStateMachine):
    """Engines report, readers go on from where they were, and the process starts anew. The model is a list per feed."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = pytest.MonkeyPatch()
        for name, value in {"MAX_KEPT": KEPT, "MAX_TOLD": TOLD}.items():
            self.patch.setattr(events_api, name, value)
        self.readers: dict[tuple[str, int | None], tuple[str | None, int]] = {}  # what each has read

    def teardown(self) -> None:
        self.patch.undo()

    @initialize(engines=st.sampled_from([1, 2]))
    def starts(self, engines: int) -> None:
        """Feeds by engine; that of all outcomes, which is also that of a lone engine, is None's."""
        self.engines, self.feeds, self.numbers = engines, Feeds(), itertools.count(1)
        self.log: dict[int | None, list[dict[str, Any]]] = {None: [], 0: [], 1: []}
        self.drafts: dict[int | None, tuple[str, str, str]] = {}
        self.loads: dict[int | None, dict[str, tuple[int, int]]] = {}
        self.latest: dict[str, bytes] = {}
        self.last_event = [0, 0]
        for engine in range(engines):
            self.feeds.add_events(self.report(engine))

    def report(self, engine: int, **more: Any) -> EngineReport:
        return reported(engine * (self.engines - 1), self.engines, **more)

    def feeds_of(self, engine: int) -> list[int | None]:
        return [None] if self.engines == 1 else [None, engine]

    def note(self, engine: int, **entry: Any) -> None:
        for feed in self.feeds_of(engine):
            self.log[feed].append(entry)

    @rule(engine=st.sampled_from([0, 1]), name=st.sampled_from("abcdefgh"), child=st.sampled_from(["", "0_", "1_"]))
    def admits(self, engine: int, name: str, child: str) -> None:
        hit = next(self.numbers)
        request = AdmittedRequest(f"{child}chatcmpl-{name}-0a1b2c3d", "hit", hit, hit + 16, (hit, 0))
        self.feeds.add_outcome(self.report(engine), request)
        if child != "1_":  # the first of several answers stands for all
            self.note(engine, outcomes=(name, "hit", hit), resolved=(name, hit + 16, (hit, 0)))
            self.latest.pop(name, None)
            self.latest[name] = b"hit,%d,%d,%d:0" % (hit, hit + 16, hit)
            if len(self.latest) > KEPT:
                del self.latest[next(iter(self.latest))]

    @rule(engine=st.sampled_from([0, 1]), name=st.sampled_from("abcdefgh"), fate=st.sampled_from(["pinned", "no_room"]))
    def pins(self, engine: int, name: str, fate: str) -> None:
        self.feeds.add_pin(self.report(engine), f"chatcmpl-{name}-0a1b2c3d", fate)
        self.note(engine, pins=(name, fate))
        if name in self.latest:
            self.latest[name] = b",".join([*self.latest[name].split(b",")[:4], fate.encode()])

    @rule(engine=st.sampled_from([0, 1]), name=st.sampled_from("ab"), state=st.sampled_from(["", "open", "closed"]))
    def drafts_were(self, engine: int, name: str, state: str) -> None:
        steps, engine_id, drafts = next(self.numbers), f"cmpl-{name}-0-0a1b2c3d", (state, "0f", "why")
        drafted = [DraftedRequest(engine_id, steps, 12)]
        self.feeds.add_drafts(self.report(engine, window_of=[(engine_id, "healed")], drafted=drafted, drafts=drafts))
        self.note(engine, windows=(name, "healed"))
        self.note(engine, drafted=(name, steps, 12))
        self.drafts |= dict.fromkeys(self.feeds_of(engine), drafts)

    @rule(engine=st.sampled_from([0, 1]), lost=st.sampled_from([0, 0, 1]), came=st.booleans(), load=st.integers(0, 2))
    def states_change(self, engine: int, lost: int, came: bool, load: int) -> None:
        """Events of a report, some of which may have been lost before it."""
        own, slot = self.feeds_of(engine)[-1], engine * (self.engines - 1)
        number = self.last_event[slot] = self.last_event[slot] + 1 + lost
        event = ["came", "chatcmpl-a-0a1b2c3d", 16, []] if came else ["gone", str(number)]
        self.loads[own] = {"a": (1, load), "b": (2, 100), "": (3, 7)} if load else {}
        self.feeds.add_events(self.report(engine, events=[(number, event)], loads=self.loads[own]))
        if lost:
            self.log[own].append({"states": ["cleared", "lost"]})
        self.log[own].append({"states": ["came", "a", 16, []] if came else event})

    @rule(name=st.sampled_from("abcdefgh"))
    def is_answered(self, name: str) -> None:
        outcome = self.feeds.main.take_latest(name)
        assert (outcome and outcome.header) == self.latest.pop(name, None), "once"

    @rule(
        reader=st.sampled_from("xy"),
        engine=st.sampled_from([None, 0, 1]),
        gateway=st.sampled_from([None, "a", "c"]),
        knows=st.sampled_from([None, "right", "9:9"]),
        meanwhile=st.sampled_from([None, 0, 1]),
    )
    def reads(self, reader: str, engine: int | None, gateway: str | None, knows: str | None, meanwhile: Any) -> None:
        feed = self.feeds.of(engine)
        if self.engines == 1:
            engine = None if engine == 0 else engine
        assert (feed is None) == (self.engines == 1 and engine == 1), "of no engine that has reported"
        if feed is None:
            return
        boot, cursor = self.readers.get((reader, engine), (None, 0))
        others = [load for name, load in self.loads.get(engine, {}).items() if name != gateway]
        beside = tuple(map(sum, zip(*others, strict=True))) or (0, 0)
        known = knows if knows != "right" else "{}:{}".format(*beside)
        waits = boot == feed.boot and cursor >= len(self.log[engine])
        waits &= gateway is None or known in (None, "{}:{}".format(*beside))

        async def scenario() -> tuple[float, dict[str, Any]]:
            loop = asyncio.get_running_loop()
            if waits and meanwhile is not None:
                loop.call_later(1.0, lambda: self.states_change(meanwhile, 0, came=False, load=1))
            answer = await feed.wait_after(cursor, boot, 5.0, gateway, known)
            return loop.time(), answer

        seconds, answer = on_virtual_time(scenario())
        wakes = meanwhile is not None and (engine is None or engine == meanwhile)
        assert seconds == ((1.0 if wakes else 5.0) if waits else 0.0)
        assert answer == self.answer(engine, feed.boot, boot, cursor, gateway)
        self.readers[reader, engine] = answer["boot"], answer["cursor"]

    def answer(
        self, engine: int | None, now: str, boot: str | None, cursor: int, gateway: str | None
    ) -> dict[str, Any]:
        log, drafts = self.log[engine], self.drafts.get(engine, ("", "", ""))
        oldest = max(1, len(log) - KEPT + 1)
        first = oldest if boot != now else max(oldest, cursor + 1)
        told = [(number, entry) for number, entry in enumerate(log, 1) if number >= first][:TOLD]
        of = {
            field: [entry[field] for _, entry in told if field in entry]
            for field in ("outcomes", "resolved", "pins", "windows", "drafted", "states")
        }
        for field in ("windows", "drafted"):
            if not of[field] and not drafts[0]:
                del of[field]
        answer = {"boot": now, "cursor": told[-1][0] if told else len(log), **of}
        if self.engines == 2 and engine is None:
            del answer["states"]  # several engines, of which each has states of its own
            return answer
        answer["reset"] = boot is not None and (boot != now or cursor + 1 < oldest)
        if drafts[0]:
            answer["drafts"] = dict(zip(("state", "id", "why"), drafts, strict=True))
        if gateway is not None:
            loads = [load for name, load in self.loads.get(engine, {}).items() if name != gateway]
            answer["load"] = tuple(map(sum, zip(*loads, strict=True))) or (0, 0)
        return answer


Reading.starts_anew = rule(engines=st.sampled_from([1, 2]))(lambda self, engines: self.starts(engines))
Reading.TestCase.settings = settings(max_examples=80, stateful_step_count=30)
TestReading = Reading.TestCase


def test_the_numbers_that_gateways_and_documents_count_on():
    api = events_api
    assert (api.MAX_KEPT, api.MAX_TOLD, api.MAX_ID, api.ID_WITHIN) == (8192, 2048, 512, 1024)
    assert (api.MAX_WAIT, api.SETTLE_SECONDS, api.LINES_PER_SECOND, api.LINES_AT_ONCE) == (10.0, 0.003, 10.0, 10.0)


@pytest.mark.parametrize(
    ("engine_id", "name"),
    [
        ("cmpl-a-b-12-00000000", "a-b"),
        ("2_cmpl-a-0-00000000", "a"),
        ("resp_a_0-00000000", "a_0"),
        ("a-b-0abcdef9", "a-b"),
        ("a-0000000", "a-0000000"),  # of another form
        ("1_b-00000000", "b"),
        ("plain", "plain"),
        ("chatcmpl-" + "x" * 600 + "-00000000", "x" * 512),
        ("x" * 600, "x" * 512),
    ],
)
def test_the_clients_name_is_in_vllms_and_a_long_one_is_not_kept_whole(engine_id, name):
    assert client_id(engine_id) == name


def test_what_can_wait_is_done_in_its_order_a_little_later_or_when_somebody_reads():
    done: list[Any] = []
    feeds = Feeds()

    async def scenario():
        clock = asyncio.get_running_loop().time
        for number in range(3):
            feeds.later(lambda number=number: done.append((number, clock())))
        assert done == []
        await asyncio.sleep(events_api.SETTLE_SECONDS)
        assert done == [(number, events_api.SETTLE_SECONDS) for number in range(3)]
        feeds.later(lambda: done.append("read"))
        feeds.main.after(0)
        assert done[3:] == ["read"]
        await asyncio.sleep(1.0)

    on_virtual_time(scenario())
    feeds.later(lambda: done.append("no event loop"))
    assert done[3:] == ["read", "no event loop"]


@pytest.fixture
def feed() -> Feed:
    return Feeds().main


def test_a_gateway_that_waits_is_woken_by_others_and_not_by_itself(feed):
    async def scenario():
        own = asyncio.create_task(feed.wait_after(0, feed.boot, 60.0, "a", "0:0"))
        other = asyncio.create_task(feed.wait_after(0, feed.boot, 60.0, "b", "0:0"))
        await asyncio.sleep(0)
        feed.set_loads({"a": GatewayLoad(1, 400)})
        assert (await other)["load"] == (1, 400)
        await asyncio.sleep(0)
        assert not own.done()
        own.cancel()

    asyncio.run(scenario())


def read_in_lines(feed: Feed, seconds: float, happens: Callable[[], Any]) -> list[Any]:
    """Answers of one read, each with when it came, while `happens` runs."""

    async def scenario():
        clock, beside = asyncio.get_running_loop().time, asyncio.create_task(happens())
        found = [(clock(), answer) async for answer in feed.answers(0, feed.boot, seconds, "a", "0:0")]
        beside.cancel()
        return found

    return on_virtual_time(scenario())


def test_a_read_in_lines_gives_each_thing_once_as_it_comes_and_ends(feed):
    async def happens():
        for at, name in ((0.5, "a"), (0.25, "b")):
            await asyncio.sleep(at)
            feed.add_outcome(admitted(name))
            feed.wake_readers()
        await asyncio.sleep(0.5)
        feed.set_loads({"b": GatewayLoad(1, 400)})

    found = read_in_lines(feed, 2.0, happens)
    told = [(at, [name for name, *_ in answer["outcomes"]], answer["load"], answer["cursor"]) for at, answer in found]
    assert told == [(0.5, ["a"], (0, 0), 1), (0.75, ["b"], (0, 0), 2), (1.25, [], (1, 400), 2), (2.0, [], (1, 400), 2)]
    assert not any(answer["reset"] for _, answer in found) and not feed._readers


def test_a_busy_feed_gives_no_more_lines_than_allowed_and_leaves_nothing_out(feed):
    async def happens():
        for number in range(10**6):
            feed.add_outcome(admitted(str(number)))
            feed.wake_readers()
            await asyncio.sleep(0.01)

    found = read_in_lines(feed, 10.0, happens)
    assert (
        10 * events_api.LINES_PER_SECOND < len(found) <= events_api.LINES_AT_ONCE + 10 * events_api.LINES_PER_SECOND + 2
    )
    names = [int(name) for _, answer in found for name, *_ in answer["outcomes"]]
    assert names == list(range(len(names))) and len(names) > 900
