"""Which prompts the self-check takes and asks, and what counts as a different answer."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import AsyncMock

import pytest

from proxy.boundaries.boundary import Boundary, Found
from proxy.chat.chat import CHAT
from proxy.chat.responses import StoredResponses
from proxy.fleet import self_check
from proxy.fleet.answer_compare import (
    FEWEST_PARTED,
    Continuation,
    ContinuedToken,
    Noise,
    Unanswered,
    distance,
    judge,
)
from proxy.fleet.answer_compare import continuation as asked
from proxy.fleet.hot_prefixes import WarmupRequest, WarmupSet
from proxy.fleet.self_check import SelfCheck
from proxy.fleet.worker import Worker
from proxy.fleet.worker_metrics import EngineInfo
from proxy.http.client import Unreachable
from proxy.idle_work import IdleWork
from proxy.metrics import Metrics
from proxy.settings import Settings
from tests.harness.drafting_engine import BLOCK, UNIT, DraftingEngine
from tests.harness.probed import probed
from tests.harness.waiting import until

RENDERER = b"renderer"

TEXT_PARTS = [{"type": "text", "text": "Tide?"}]

IMAGE = [*TEXT_PARTS, {"type": "image_url", "image_url": {"url": "data:,"}}]


class Engine:
    """Answers every prompt alike, but for the salts under which something is cached, or wrong."""

    def __init__(self) -> None:
        self.asked: list[dict] = []
        self.cached_under: set[str | None] = set()
        self.wrong_under: set[str | None] = set()
        self.metrics = ""
        self.before: Callable[[str], Awaitable[None]] | None = None  # called with the URL of each request

    async def fetch(self, method: str, url: str, body: bytes = b"", timeout: float | None = None) -> tuple[int, bytes]:
        if self.before is not None:
            await self.before(url)
        if url.endswith("/metrics"):
            return 200, self.metrics.encode()
        asked = json.loads(body)
        self.asked.append(asked)
        cached = 48 if asked.get("cache_salt") in self.cached_under else 0
        usage = {"prompt_tokens": 64, "prompt_tokens_details": {"cached_tokens": cached}}
        logprob = -0.5123 if asked.get("cache_salt") not in self.wrong_under else -0.9
        logprobs = {"tokens": ["token_id:7"], "top_logprobs": [{"token_id:7": logprob, "token_id:8": -1.0}]}
        return 200, json.dumps({"choices": [{"logprobs": logprobs}], "usage": usage}).encode()


async def render(body, path=CHAT) -> list[int]:
    return list(range(64))


def replay(last: bytes, content: object = "Tide?", **put) -> WarmupRequest:
    raw = json.dumps({"model": "m", "messages": [{"role": "user", "content": content}]}).encode()
    found = Found((Boundary("system", b"system", "last:63"), Boundary("turn", last, 80)), renderer_id=RENDERER)
    return WarmupRequest(CHAT, raw, ("model", "messages"), put, found, "m")


@pytest.fixture
def worker() -> Worker:
    engine = EngineInfo("0.3.0", "0", match_unit=16, block_size=384)
    found = Worker("http://w", renderer=render, probed=probed("w#1", engine, "m"), up=True)
    found.renderer_ids["m"] = RENDERER
    return found


@pytest.fixture
def engine() -> Engine:
    return Engine()


def check_of(
    worker: Worker,
    engine: Engine | DraftingEngine,
    *requests: WarmupRequest,
    often: bool = False,
    distrust: Callable[[Worker], None] = lambda worker: None,
    metrics: Metrics | None = None,
) -> SelfCheck:
    warmup, pool = WarmupSet(10**6), SimpleNamespace(workers=[worker])
    for number, request in enumerate(requests):
        warmup.add(bytes([number]), 1000 - number, (), request)
    settings = Settings(self_check_interval=1e-6 if often else 10.0)
    stored = StoredResponses(10**6)
    return SelfCheck(settings, pool, warmup, stored, engine, metrics or Metrics(), IdleWork(), distrust)


async def judged(worker: Worker, engine: Engine, request: WarmupRequest):
    return await check_of(worker, engine, request)._judge(worker, request, self_check._Watched())


async def test_the_prompt_is_asked_under_the_salt_of_its_api_key_and_computed_anew_under_others(worker, engine):
    request = replay(b"first", cache_salt="anns")
    engine.cached_under.add("anns")
    verdict = await judged(worker, engine, request)
    assert verdict is not None and verdict.result == "same"
    salts = [asked.get("cache_salt") for asked in engine.asked]
    assert salts[:2] == ["anns", "anns"] and "anns" not in salts[2:] and all(salts)


@pytest.mark.parametrize(("content", "asks"), [("Tide?", True), (TEXT_PARTS, True), (IMAGE, False), (None, False)])
async def test_chats_of_text_are_checked_however_they_are_written_and_images_are_not(worker, engine, content, asks):
    request = replay(b"first", content)
    if content is None:
        request = request._replace(raw=b'{"model":"m","messages":[]}')
    await judged(worker, engine, request)
    assert bool(engine.asked) is asks


async def test_recomputed_answers_that_came_from_a_cache_are_not_judged(worker, engine, monkeypatch):
    monkeypatch.setattr(self_check, "fresh_salt", lambda: "fresh")
    engine.cached_under |= {None, "fresh"}
    assert await judged(worker, engine, replay(b"first")) is None


async def test_a_worker_with_requests_of_another_gateway_is_left_alone(worker, engine):
    engine.metrics = 'vllm:num_requests_waiting{engine="0"} 1.0\n'
    assert await judged(worker, engine, replay(b"first")) is None and not engine.asked


async def test_a_clients_request_ends_a_check_at_once(worker, engine):
    """Its request is given up before the client's goes out: nothing is polled, no time passes."""
    computing, left = asyncio.Event(), asyncio.Event()

    async def computes(url: str) -> None:
        if not url.endswith("/metrics"):
            computing.set()
            try:
                await asyncio.Event().wait()
            finally:
                left.set()

    engine.before = computes
    check = check_of(worker, engine, replay(b"first"))
    assert check._is_due(worker) is False  # it has just come
    watched = check._watched[worker.url]
    checking = asyncio.create_task(check._check(worker, watched))
    await computing.wait()
    worker.dispatched += 1
    (judging := worker.self_check).cancel()
    for _ in range(3):
        await asyncio.sleep(0)
    assert left.is_set()
    await checking
    assert check.checked == 0 and judging.cancelled()
    computing.clear()
    await check._check(worker, watched)
    assert not computing.is_set(), "one that came before a check begins is not met by it"


@pytest.fixture
def soon(monkeypatch) -> None:
    """Workers are idle as soon as they have no request, and looked at again and again."""
    monkeypatch.setattr(self_check, "IDLE_SECONDS", 0.0)
    monkeypatch.setattr(self_check, "POLL_SECONDS", 0.0)


@pytest.mark.parametrize("odd", ["fails", "hangs", "is on trial"])
async def test_idle_workers_are_checked_for_ever_and_an_odd_one_keeps_no_other_from_it(
    worker, engine, soon, caplog, monkeypatch, odd
):
    async def goes_wrong(url: str) -> None:
        if url.startswith("http://odd") and odd != "is on trial":
            await (asyncio.Event().wait() if odd == "hangs" else AsyncMock(side_effect=RuntimeError("planned"))())

    monkeypatch.setattr(self_check, "CHECK_SECONDS", 0.05)
    engine.before = goes_wrong
    engine.cached_under.add(None)
    drafts = "trial" if odd == "is on trial" else ""
    seen = probed("w#1", replace(worker.engine, drafts=drafts), "m")
    other, metrics = Worker("http://odd", renderer=render, probed=seen, up=True), Metrics()
    check = check_of(worker, engine, replay(b"first"), replay(b"second"), often=True, metrics=metrics)
    check._pool.workers.insert(0, other)
    running, began = asyncio.create_task(check.run()), time.monotonic()
    await until(lambda: check.checked >= 4)
    worker.dispatched += 1  # else it is left alone after some checks
    seen = check.checked
    await until(lambda: check.checked > seen)

    def unanswered() -> float | None:
        return metrics.registry.get_sample_value("seamark_self_check_total", {"result": "unanswered"})

    await until(lambda: odd != "hangs" or unanswered())
    running.cancel()
    assert check.differs == 0 and not check.hints_off
    if odd == "fails":
        assert "self-check of worker odd: RuntimeError" in caplog.text and "planned" not in caplog.text
    elif odd == "hangs":
        rested = check._watched[other.url].next_at - began
        assert check._watched[other.url].checks >= 1 and rested > 0.15, "a deadline counts as a check"
    else:
        assert other.url not in check._watched or not check._watched[other.url].checks


async def test_a_worker_that_answers_otherwise_loses_its_hints_and_then_its_cache_and_is_watched_closely(
    worker, engine, caplog
):
    distrusted, metrics, request = [], Metrics(), replay(b"first")
    check = check_of(worker, engine, request, distrust=distrusted.append, metrics=metrics)
    engine.cached_under.add(None)
    engine.wrong_under.add(None)
    watched = check._watched[worker.url] = self_check._Watched(checks=40, last_dispatched=0)
    await check._check(worker, watched)
    assert (check.checked, check.differs, check.hints_off, check.cache_off) == (1, 1, True, False)
    assert distrusted == [worker] and watched.checks == 0 and "gets no more hints" in caplog.text
    salt = worker.salt({"model": "m"})
    engine.cached_under.add(salt)
    engine.wrong_under.add(salt)
    await check._check(worker, watched)
    assert (check.checked, check.differs, check.hints_off, check.cache_off) == (2, 2, True, True)
    assert distrusted == [worker, worker]
    value = metrics.registry.get_sample_value
    assert value("seamark_self_check_total", {"result": "differs"}) == 2
    assert not check._is_due(worker)  # there is nothing left to check


@pytest.mark.parametrize(("checks", "rest"), [(0, 9), (15, 9), (16, 49)])
@pytest.mark.parametrize("took", [2.0, 0.001])
@pytest.mark.parametrize("answers", [True, False])
async def test_a_check_is_followed_by_a_rest_as_it_took_whatever_came_of_it(
    worker, engine, monkeypatch, checks, rest, took, answers
):
    clock = SimpleNamespace(now=1000.0)
    monkeypatch.setattr(self_check, "time", SimpleNamespace(monotonic=lambda: clock.now))

    async def is_slow(url: str) -> None:
        clock.now += took if url.endswith("/metrics") else 0.0
        if not answers:
            raise Unreachable

    engine.before, request = is_slow, replay(b"first")
    check = check_of(worker, engine, request)
    watched = self_check._Watched(last_dispatched=0, checks=checks, in_a_row=2)
    await check._check(worker, watched)
    assert watched.next_at == pytest.approx(1000 + took + max(10.0, rest * took))
    assert (watched.checks, watched.in_a_row, check.checked) == (checks + 1, 3, 0)
    assert check._next(worker) is request and check._checked_at


def checked(engine: DraftingEngine, seed: int = 0) -> tuple[SelfCheck, Worker, WarmupRequest]:
    """A check of a worker that drafts, and a prompt of 200 tokens of its own for each seed."""
    draw = random.Random(seed)
    renders = AsyncMock(return_value=[draw.randrange(1000, 4000) for _ in range(200)])
    info = EngineInfo("0.3.0", "0", match_unit=UNIT, block_size=BLOCK, ahead=1, drafts="on")
    worker = Worker("http://w", renderer=renders, probed=probed("w#1", info, "m"), up=True)
    worker.renderer_ids["m"] = RENDERER
    request = replay(b"", cache_salt=f"salt {seed}")
    request = request._replace(found=Found((Boundary("turn", b"turn", 180),), renderer_id=RENDERER))
    return check_of(worker, engine), worker, request


@pytest.mark.parametrize("noise", [0.0, 0.0005, 0.004])
async def test_a_state_a_unit_early_is_seen_through_the_noise_which_alone_raises_no_alarm(noise):
    for off, results in ((0.25, {"differs"}), (0.0, {"same", "noise"})):
        engine = DraftingEngine(noise=noise, hits_off=off, draw=random.Random(6))
        for seed in range(20):
            check, worker, request = checked(engine, seed)
            verdict = await check._judge(worker, request, self_check._Watched())
            assert verdict is not None and verdict.result in results, (seed, verdict)


def continuation(*tops: dict[str, float], cached: int = 0) -> Continuation:
    """A continuation with these logprobs at each step, always the likeliest token."""
    return Continuation(tuple(ContinuedToken(max(top, key=top.get), top) for top in tops), cached)


@pytest.mark.parametrize(
    ("off", "noise", "grain", "result"),
    [
        (0.001, 0.0, 0.0, "same"),
        (0.00101, 0.0, 0.0, "differs"),
        (0.03, 0.01, 0.0, "noise"),
        (0.0625, 0.0, 1 / 64, "noise"),
        (0.0626, 0.0, 1 / 64, "differs"),
        (1.0, 9.0, 0.0, "noise"),
        (1.001, 9.0, 1 / 4, "differs"),  # no noise is so large
    ],
)
def test_noise_is_three_times_what_recomputed_answers_differ_by_or_four_steps_of_their_logits(
    off, noise, grain, result
):
    right = continuation({"a": 0.0, "b": -(grain or 5.1234), "c": -5 * (grain or 1.4321)})
    cached = continuation({**right.steps[0].top, "a": -off})
    verdict = judge([right, cached], [continuation({"x": 0.0, "y": -9.1234}), right], noise)
    assert (verdict.result, verdict.off.error, verdict.cached, verdict.recomputed) == (result, off, cached, right)


@pytest.mark.parametrize(
    ("one", "other", "error"),
    [
        ({"a": -0.1, "b": -2.0}, {"a": -0.1, "c": -5.0}, 3.0),  # b is at most as likely as c over there
        ({"a": -0.1, "b": -7.0}, {"a": -0.1, "c": -5.0}, 2.0),  # of c, for b is the last
        ({"a": -0.1}, {"a": -0.1, "b": -3.0}, 0.0),
        ({"a": -0.5, "b": -0.6}, {"a": -0.6, "b": -0.5}, 0.1),  # another token, with which it ends
    ],
)
def test_a_token_that_the_other_does_not_name_is_off_by_what_it_must_be(one, other, error):
    behind = {"z": -0.1, "y": -3.0}
    answers = continuation(one, behind), continuation(other, behind if error != 0.1 else {"x": -9.0})
    apart = distance(*(answer.steps for answer in answers))
    assert apart == (pytest.approx(error), 0 if error == 0.1 else None)


LOGPROBS = {"tokens": ["token_id:7"], "top_logprobs": [{"token_id:7": -0.5, "token_id:8": -1.0}]}

USAGE = {"prompt_tokens": 64, "prompt_tokens_details": {"cached_tokens": 48}}


@pytest.mark.parametrize(
    ("logprobs", "usage", "status"),
    [
        (LOGPROBS, USAGE, 400),
        (None, USAGE, 200),
        ({"tokens": ["a", "b"], "top_logprobs": [{"a": -0.5}, {}]}, USAGE, 200),
        (LOGPROBS, None, 200),
    ],
)
async def test_what_cannot_be_compared_is_no_continuation(logprobs, usage, status):
    answer = json.dumps({"choices": [{"logprobs": logprobs}], "usage": usage}).encode()
    with pytest.raises(Unanswered):
        await asked(SimpleNamespace(fetch=AsyncMock(return_value=(status, answer))), "http://w", b"", 1.0)


def logprob(value: float, cached: int = 0) -> Continuation:
    """One token with this logprob, beside one that is never a multiple of a grain behind it."""
    return continuation({"a": value, "other": value - 5.1234}, cached=cached)


@pytest.mark.parametrize(
    ("answers", "asked", "largest"),
    [
        ([0.0, 0.5, 0.0], [30] * 3, 0.5),
        ([None, 0.5, 0.0, 0.0, 0.0, 0.6], [30] * 3 + [40] * 3, 0.6),
        ([None, 0.5, 0.0, 0.5, None, 0.5], [30] * 3 + [40] * 3, 0.2),
    ],
)
async def test_beginnings_of_a_prompt_are_recomputed_three_times_until_its_noise_is_known(answers, asked, largest):
    """Answers that came from a cache (None) say nothing of it."""
    noise, lengths, left = Noise(), [], list(answers)
    noise.add([logprob(0.0), logprob(0.2)])

    async def recomputed(prompt):
        lengths.append(len(prompt))
        assert list(prompt) == list(range(len(prompt)))
        value = left.pop(0)
        return logprob(value or 0.0, cached=16 if value is None else 0)

    await noise.learn(range(60), recomputed)
    assert lengths == asked and noise.largest == pytest.approx(largest) and not left


def test_an_answers_tokens_have_a_name():
    named = Continuation(tuple(ContinuedToken(f"token_id:{each}", {}) for each in (7, 8)), 0)
    assert named.hash == named._replace(cached=9).hash != named._replace(steps=named.steps[:1]).hash


@pytest.mark.parametrize(
    ("hit", "again", "excused"),
    [
        ("aaaa", "aaaa", True),
        ("abbb", "aaaa", False),  # other tokens in most steps, where recomputed answers have the same
        ("aaab", "aaaa", True),
        ("abbb", "abaa", True),
    ],
)
def test_other_tokens_in_most_steps_of_most_prompts_are_no_noise(hit, again, excused):
    def answer(tokens: str) -> Continuation:
        return Continuation(tuple(ContinuedToken(each, {"a": -0.7, "b": -0.7}) for each in tokens), 0)

    noise = Noise()
    told = [noise.excuses([answer(hit)] * 2, [answer("aaaa"), answer(again)]) for _ in range(FEWEST_PARTED)]
    assert all(told[:-1]) and told[-1] is excused
    assert noise.excuses([answer("aaaa")], [answer("aaaa")]), "this one has the same tokens"
    assert noise.excuses([answer(hit)] * 2, [answer("aaaa"), answer(again)]) is excused, "one of eight is not enough"
    assert Noise().excuses([answer(hit)], [answer("aaaa"), answer(again)])
