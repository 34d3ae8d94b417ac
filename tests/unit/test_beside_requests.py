"""Nothing beside a request holds up its bytes: how such work is written, how much a step does, and who goes first.

Structure and counts, no times: the rule is in CONTRIBUTING.
"""

from __future__ import annotations

import ast
import asyncio
import inspect
import json
import random
from collections import Counter
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from proxy.boundaries.layout import layout_of
from proxy.chat.reader import chat_request
from proxy.fleet.part import Shelf
from proxy.fleet.worker import Worker
from proxy.idle_work import LULL_SECONDS, IdleWork, Steps, within
from proxy.metrics import Metrics
from proxy.observability import request_diff, volatile_text
from proxy.observability.request_diff import MAX_REQUESTS, RememberedRequest, RequestMemory
from proxy.pipeline.gateway import Gateway
from proxy.routing.engine_events import STEP_EVENTS, EngineEvents, _FeedReader
from proxy.routing.feed_lines import read_line
from proxy.routing.held_states import HeldStates
from proxy.routing.prefix_index import PrefixIndex
from proxy.server.app import exposition_of
from proxy.settings import Settings
from tests.harness.probed import probed
from tests.harness.steps import finished
from tests.harness.virtual_time import on_virtual_time

PROXY = Path(__file__).parents[2] / "proxy"

# What runs in the gateway, not what a command does in a process of its own.
ROOMS = ("http", "chat", "boundaries", "fleet", "routing", "observability", "pipeline", "server")

# Parts that go without a lull, and why nothing that a client or an engine sends makes them long.
SHORT_PARTS = {
    "heartbeats": "a comment for each stream that is silent",
    "discovery": "a name and its addresses",
    "pinned_prompts": "sixty-four prompts at most, each of which is a request of the gateway's own",
}

LOOPS = (ast.For, ast.While, ast.AsyncFor, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp, ast.Await)


def name_of(function: ast.expr) -> str:
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def functions(tree: ast.Module, *, in_steps: bool) -> set[str]:
    """Names of those whose work is in steps, or of all others."""
    found = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    return {each.name for each in found if ast.unparse(each.returns or each).startswith("Steps[") is in_steps}


def given_away(tree: ast.Module) -> set[ast.expr | None]:
    """Work that is part of other such work, given to `IdleWork` or a caller; named `steps`, it is given away below."""
    taken: set[ast.expr | None] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.YieldFrom | ast.Return):
            taken.add(node.value)
        elif isinstance(node, ast.Call) and name_of(node.func) in ("add", "finish", "within", "spend"):
            taken.update(node.args)
        elif isinstance(node, ast.Assign) and name_of(node.targets[0]) == "steps":
            taken.add(node.value)
    return taken


def test_work_in_steps_is_done_by_nobody_in_one_go():
    """A plain call would do nothing, and a loop over it all of it."""
    trees = {path: ast.parse(path.read_text()) for room in ROOMS for path in (PROXY / room).glob("*.py")}
    steps = {name: functions(tree, in_steps=True) for name, tree in trees.items()}
    plain = set().union(*(functions(tree, in_steps=False) for tree in trees.values()))
    everywhere = set().union(*steps.values()) - plain | {"finished"}
    assert {"seek_change", "kind_of", "rendered_otherwise"} <= everywhere
    for name, tree in trees.items():
        taken, wanted = given_away(tree), steps[name] | everywhere
        calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and name_of(node.func) in wanted]
        assert [ast.unparse(call) for call in calls if call not in taken] == [], name


def test_a_streams_end_does_nothing_that_takes_longer_the_more_there_is():
    """What it does beyond that is given to `IdleWork`, behind its last byte."""
    tree = ast.parse((PROXY / "pipeline" / "accounting.py").read_text())
    found = {node.name: node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    for name in ("reported", "settle"):
        assert not [node for node in ast.walk(found[name]) if isinstance(node, LOOPS)], name
    forward = ast.parse((PROXY / "pipeline" / "forward.py").read_text())
    (stream,) = (node for node in ast.walk(forward) if getattr(node, "name", "") == "_stream_events")
    last = stream.body[-1]
    assert isinstance(last, ast.Expr) and isinstance(last.value, ast.Call)
    assert ast.unparse(last.value.func) == "self._accounting.reported"


def test_each_part_that_runs_beside_requests_waits_for_a_lull(monkeypatch):
    """Or is known to do little, whatever there is."""
    started: dict[str, Any] = {}
    monkeypatch.setattr(Shelf, "keep_running", lambda self, name, run: started.setdefault(name, run))
    monkeypatch.setattr("asyncio.create_task", lambda part: part)
    others = {"workers_dns": ("http://n:1",), "prefill_worker": ("http://p",), "redis": "redis://127.0.0.1:1"}
    Gateway(Settings(worker=("http://w",), **others)).start()
    assert started.keys() > SHORT_PARTS.keys() and {"workers", "redis", "shadow", "files"} <= started.keys()
    for name, run in started.items():
        if name not in SHORT_PARTS:
            assert "await self._idle.lull(" in inspect.getsource(type(run.__self__)).replace(".idle.", "._idle."), name
    assert "await self._idle.finish(self._apply(" in inspect.getsource(EngineEvents._read)


@pytest.fixture
def counts(monkeypatch) -> Counter[str]:
    """Of the pieces of work in a search for a change."""
    counts: Counter[str] = Counter()

    def count(owner: Any, name: str) -> None:
        real = getattr(owner, name)

        def counting(*args: Any, **named: Any) -> Any:
            counts[name] += 1
            return real(*args, **named)

        monkeypatch.setattr(owner, name, counting)

    for name in ("own_hash", "canonical", "common_prefix", "alike"):
        count(request_diff, name)
    for name in ("_day_at", "_word_at"):
        count(volatile_text, name)
    return counts


def chats(kind: str) -> Iterator[dict[str, Any]]:
    draw = random.Random(7)

    def words(count: int) -> list[str]:
        return [str(draw.getrandbits(40)) for _ in range(count)]

    shared = words(3000)
    for number in range(MAX_REQUESTS + 1):
        system, messages = [str(number), *shared, str(number), *shared], [{"role": "user", "content": "Q"}]
        if kind == "many short messages":
            messages = [{"role": "user", "content": " ".join(words(3))} for _ in range(400)]
        functions = [{"name": f"t{i}", "description": " ".join(words(40))} for i in range(40 if kind == "tools" else 0)]
        tools = [{"type": "function", "function": function} for function in functions]
        text = ("\n" if kind == "lines" else " ").join(["2026"] * 9000 + system if kind == "years" else system)
        yield {"tools": tools, "messages": [{"role": "system", "content": text}, *messages]}


@pytest.mark.parametrize("kind", ["many short messages", "a number in a long text", "lines", "years", "tools"])
def test_a_step_of_the_search_for_a_change_is_short_whatever_was_sent(counts, kind):
    memory, steps = RequestMemory(2**30, now=lambda: 1795600000.0), []
    for body in chats(kind):
        last = RememberedRequest(layout_of(chat_request(body), b"r"), len(json.dumps(body)))
        memory.add(last)
    assert not counts  # nothing is compared, nor hashed for that, while the request waits
    for _ in memory.seek_change(last, 1000, 0):
        steps.append(Counter(counts))
        counts.clear()
    assert len(steps) > MAX_REQUESTS
    for step in [*steps, counts]:
        assert step["own_hash"] + step["alike"] <= 1 and step["common_prefix"] <= 2
        assert step["canonical"] <= 3 and step["_day_at"] <= 2 and step["_word_at"] <= 2


def test_what_an_engine_reports_is_applied_a_few_events_at_a_time(monkeypatch):
    applied: Counter[str] = Counter()

    def apply(self: HeldStates, event: Any, boot: str) -> None:
        applied["events"] += 1

    monkeypatch.setattr(HeldStates, "apply", apply)
    index = PrefixIndex(10**6)
    feed, worker = _FeedReader(HeldStates(index, lambda *_: None)), Worker("http://w", None, probed=probed("w#1"))
    events = EngineEvents(SimpleNamespace(), index, IdleWork(), Shelf(Metrics()))  # type: ignore[arg-type]
    told = [["admitted", str(i), "hit", 0, 0, []] for i in range(1000)]
    line = read_line(json.dumps({"boot": "b", "cursor": 1, "reset": False, "events": told}).encode())
    done = [applied["events"] + len(feed.outcomes) for _ in chain(events._apply(worker, feed, line), ["the end"])]
    assert done[-1] == 2000 and max(map(int.__sub__, done, [0, *done])) <= 2 * STEP_EVENTS


def test_metrics_are_written_a_family_at_a_time():
    gateway = Gateway(Settings(worker=("http://w",)))
    families = list(gateway.metrics.registry.collect())
    assert sum(1 for _ in exposition_of(gateway.metrics.registry)) >= len(families) > 20
    text = finished(exposition_of(gateway.metrics.registry))
    assert all(f"# HELP {family.name}".encode() in text for family in families)


@pytest.fixture
def idle() -> IdleWork:
    """By the loop's own clock, which is virtual; a slice is one step."""
    return IdleWork(now=lambda: asyncio.get_running_loop().time(), slice_seconds=0.0)


def noting(seen: list[str], *words: str) -> Steps[str]:
    for word in words:
        seen.append(word)
        yield
    return "done"


@on_virtual_time
async def test_a_failure_is_told_by_its_kind_and_the_next_job_goes_on(idle, caplog):
    def failing() -> Steps[None]:
        yield
        raise ValueError("secret")

    seen: list[str] = []
    idle.add(failing())
    idle.add(noting(seen, "a"))
    idle.add(failing())
    await idle.caught_up()
    await asyncio.sleep(1)
    assert seen == ["a"] and caplog.text.count("ValueError") == 2 and "secret" not in caplog.text
    assert not idle._jobs


@on_virtual_time
async def test_between_two_steps_the_loop_turns_to_everything_else(idle):
    seen: list[str] = []
    idle.add(noting(seen, *"abc"))
    asking = asyncio.create_task(idle.caught_up())
    while not asking.done():
        seen.append("-")
        await asyncio.sleep(0)
    assert "".join(seen).strip("-").replace("--", "-") == "a-b-c"


@on_virtual_time
async def test_what_somebody_waits_for_is_done_now_and_still_in_steps(idle):
    seen: list[str] = []
    idle.put_off()
    other = asyncio.create_task(idle.finish(noting(seen, "x", "y")))
    assert await idle.finish(noting(seen, "a", "b")) == "done" == await other
    assert sorted(seen[:2]) == ["a", "x"] and sorted(seen[2:]) == ["b", "y"]


@on_virtual_time
async def test_a_request_that_comes_between_two_steps_goes_first(idle):
    seen: list[str] = []

    def steps() -> Steps[None]:
        seen.append("first")
        idle.put_off()
        yield
        seen.append("second")

    idle.add(steps())
    await asyncio.sleep(LULL_SECONDS * 1.5)
    assert seen == ["first"]
    await asyncio.sleep(LULL_SECONDS)
    assert seen == ["first", "second"]


@on_virtual_time
async def test_who_stops_asking_hurries_nobody(idle):
    seen: list[str] = []
    idle.add(noting(seen, *"abc"))
    idle.put_off()
    asking = asyncio.create_task(idle.caught_up())
    await asyncio.sleep(0)
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    steps = len(seen)
    await asyncio.sleep(0)
    assert len(seen) == steps < 3
    await asyncio.sleep(LULL_SECONDS * 2)
    assert len(seen) == 3


def test_what_takes_too_long_is_given_up():
    seen: list[str] = []
    assert finished(within(30.0, noting(seen, *"ab"))) == "done"
    with pytest.raises(TimeoutError):
        finished(within(0.0, noting(seen, *"cd")))
    assert seen == ["a", "b", "c"]
