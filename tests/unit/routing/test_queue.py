"""The queue before the workers, and the choice among them, beside the same rule in its plainest words."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from proxy.errors import GatewayError, KeyBusy, NoWorker, Overloaded
from proxy.fleet.worker import Load, Worker
from proxy.fleet.worker_metrics import EngineInfo
from proxy.http.auth import ApiKey, KeyEntry
from proxy.metrics import Distribution
from proxy.routing import policy
from proxy.routing.prefix_index import Holding
from proxy.routing.queue import AdmissionQueue
from tests.harness.probed import probed
from tests.harness.virtual_time import VirtualTimeLoop, on_virtual_time

TIMEOUT = 5.0


def queue_of() -> AdmissionQueue:
    return AdmissionQueue(4, TIMEOUT, Distribution("seconds", ""))


def key_of(inflight: int = 0, queued: int = 64, under_way: int = 0) -> ApiKey:
    entry = KeyEntry(sha256="0" * 64, max_inflight=inflight, max_queued=queued)
    return ApiKey("anns", entry, "salt", under_way=under_way)


class Asked:
    """A request, which takes what is there for its model once its key may have another one."""

    def __init__(self, scene: Waiting, key: ApiKey | None, model: str, until: float) -> None:
        self.scene, self.key, self.model, self.until = scene, key, model, until
        self.has: Any = None
        self.refused: Exception | None = None
        self.task: asyncio.Task[None] = None  # type: ignore[assignment]

    @property
    def waits(self) -> bool:
        return self.has is None and not self.task.done()

    @property
    def has_slot(self) -> bool:
        return self.has not in (None, "ended")

    @property
    def may_go(self) -> bool:
        return self.key is None or self.key.has_room

    def take(self) -> Any:
        assert self.may_go
        if self.model in self.scene.gone:
            raise NoWorker("No worker is ready for this model.")
        if not self.scene.free[self.model]:
            return None
        before = self.scene.asked[: self.scene.asked.index(self)]
        assert not any(each.waits and each.model == self.model and each.may_go for each in before), "it has passed one"
        if self.key is not None:
            self.key.under_way += 1
        return self.scene.free[self.model].pop()

    def give_back(self, slot: Any) -> None:
        self.scene.free[self.model].append(slot)
        if self.key is not None:
            self.key.under_way -= 1

    async def run(self, waited: float) -> None:
        try:
            self.has = await self.scene.queue.acquire(self.key, self.model, self.take, self.give_back, waited)
        except GatewayError as error:
            self.refused = error


class Waiting(RuleBasedStateMachine):
    """Requests for two models, of two keys with limits and without one."""

    model = st.sampled_from("mn")

    def __init__(self) -> None:
        super().__init__()
        self.loop, self.queue = VirtualTimeLoop(), queue_of()
        self.keys = [None, key_of(inflight=1), key_of(queued=2)]
        self.asked: list[Asked] = []
        self.free = {"m": ["m1"], "n": ["n1"]}
        self.gone: set[str] = set()

    def teardown(self) -> None:
        for each in self.asked:
            each.task.cancel()
        self.settle()
        has = {*self.free["m"], *self.free["n"], *(each.has for each in self.served())}
        assert has == {"m1", "n1"} and not self.queue.waiting
        self.loop.close()

    def settle(self, seconds: float = 0.0) -> None:
        async def until_still() -> None:
            await asyncio.sleep(seconds)
            for _ in range(5):
                await asyncio.sleep(0)

        self.loop.run_until_complete(until_still())

    def waiting(self) -> list[Asked]:
        return [each for each in self.asked if each.waits]

    def served(self) -> list[Asked]:
        return [each for each in self.asked if each.has_slot]

    @rule(
        at=st.integers(0, 2),
        model=model,
        waited=st.sampled_from([0.0, 0.0, 2.0, 9.0]),
        times=st.integers(1, 3),
    )
    def asks(self, at: int, model: str, waited: float, times: int) -> None:
        for _ in range(times):
            self._asks(self.keys[at], model, waited)

    def _asks(self, key: ApiKey | None, model: str, waited: float) -> None:
        one = Asked(self, key, model, self.loop.time() + max(0.0, TIMEOUT - waited))
        queued, all_queued = (key.queued if key is not None else 0), len(self.queue.waiting)
        behind = any(each.model == model and each.may_go for each in self.waiting())
        finds_slot = not behind and bool(self.free[model] or model in self.gone)
        goes = one.may_go and finds_slot
        self.asked.append(one)
        one.task = self.loop.create_task(one.run(waited))
        self.settle()
        if goes:
            assert one.has is not None or isinstance(one.refused, NoWorker)
        elif (key is not None and queued >= key.entry.max_queued) or all_queued == 4:
            is_its_own = queued >= key.entry.max_queued or not one.may_go if key is not None else False
            assert type(one.refused) is (KeyBusy if is_its_own else Overloaded)
        elif waited < TIMEOUT:
            assert one.waits

    @precondition(served)
    @rule(draw=st.data(), leaves=st.booleans())
    def ends(self, draw: Any, leaves: bool) -> None:
        """In that very moment one that waits may leave."""
        one = draw.draw(st.sampled_from(self.served()))
        one.give_back(one.has)
        one.has = "ended"
        self.queue.wake()
        if leaves and self.waiting():
            draw.draw(st.sampled_from(self.waiting())).task.cancel()
            self.settle()
        self.queue.wake()
        self.settle()

    @precondition(waiting)
    @rule(draw=st.data())
    def leaves(self, draw: Any) -> None:
        draw.draw(st.sampled_from(self.waiting())).task.cancel()
        self.settle()
        self.queue.wake()
        self.settle()

    @rule(model=model)
    def another_way(self, model: str) -> None:
        """The workers of a model go or are there again."""
        self.gone.symmetric_difference_update({model})
        self.queue.wake()
        self.settle()

    @rule(seconds=st.sampled_from([1.0, 3.0]))
    def time_passes(self, seconds: float) -> None:
        self.settle(seconds)
        self.queue.wake()
        self.settle()

    @invariant()
    def nobody_waits_for_nothing_and_all_are_counted(self) -> None:
        waiting = self.waiting()
        assert len(self.queue.waiting) == len(waiting)
        for key in filter(None, self.keys):
            assert key.queued == sum(each.key is key for each in waiting)
            assert key.under_way == sum(each.key is key for each in self.served())
        for each in waiting:
            assert self.loop.time() < each.until
            assert not (each.may_go and self.free[each.model] and each.model not in self.gone)
        for each in self.asked:
            if isinstance(each.refused, KeyBusy | Overloaded) and "within" in str(each.refused):
                assert self.loop.time() >= each.until


TestWaiting = Waiting.TestCase
TestWaiting.settings = settings(max_examples=50, stateful_step_count=25)


@on_virtual_time
async def test_a_request_waits_for_so_long_in_all_and_is_refused_by_what_it_waited_for() -> None:
    loop = asyncio.get_running_loop()
    for key, waited, error, words in (
        (None, 0.0, Overloaded, "No slot became free within 5 seconds: all workers are busy"),
        (key_of(), 2.0, Overloaded, "all workers are busy"),
        (key_of(inflight=2, under_way=2), 0.0, KeyBusy, "within 5 seconds, and it may have 2 under way"),
        (key_of(), 9.0, Overloaded, "within 5 seconds"),
    ):
        queue, began = queue_of(), loop.time()
        with pytest.raises(error, match=words):
            await queue.acquire(key, "m", lambda: None, lambda _: None, waited=waited)
        assert loop.time() - began == max(0.0, TIMEOUT - waited)
        assert len(queue.waiting) == 0 and (key is None or key.queued == 0)


def worker(name: str, **fields: Any) -> Worker:
    engine = EngineInfo("0.1.0", "0.32.0", match_unit=16, block_size=384)
    return Worker(f"http://{name}", renderer=None, probed=probed(name, engine), **fields)


WORKERS = st.lists(
    st.tuples(
        st.sampled_from([0, 15, 16, 31, 400, 407, 8192, 60_000]),  # tokens that it holds
        st.integers(0, 2),  # how often its answers differed
        st.booleans(),  # whether it has the plugin
        st.integers(0, 3),  # requests under way
        st.integers(0, 2),  # that it was sent
        st.sampled_from([0, 1500, 4096, 49_152, 49_153, 240_000]),  # tokens to prefill
        st.sampled_from([Load(), Load(), Load(1, 700)]),  # of other gateways
    ),
    min_size=1,
    max_size=4,
)


@settings(max_examples=200)
@given(WORKERS, st.sampled_from([0, 8]), st.sampled_from([0, 16, 8192]), st.sampled_from([None, "session"]))
def test_the_longest_prefix_decides_unless_its_worker_is_ahead_by_more_than_that_is_worth(
    drawn, slack, shared, session
):
    workers, held, has, work = [], {}, {}, {}
    for name, (tokens, differed, patched, inflight, dispatched, prefill, others) in zip("abcd", drawn, strict=False):
        counts = {"inflight": inflight, "dispatched": dispatched, "prefill_tokens": prefill}
        one = worker(name, **counts, others=others, in_shadow=not patched)
        for _ in range(differed):
            one.quarantine()
        workers.append(one)
        held[name] = Holding(tokens, b"key", is_told=True)
        has[name] = 0 if differed == 2 else tokens // 16 * 16
        work[name] = prefill + others.prefill_tokens + policy.REQUEST_TOKENS * (inflight + others.requests)
    least, more = min(work.values()), slack * policy.REQUEST_TOKENS
    unseen = policy.UNSEEN_TOKENS if any(one.others.requests for one in workers) and session is None else 0
    for length in sorted(filter(None, has.values()), reverse=True):
        bars = [(0, least), *((has[name], work[name]) for name in has if 0 < has[name] < length)]
        most = more + min(other_work + policy.worth_waiting(length, other, shared) for other, other_work in bars)
        if near := [name for name in has if has[name] == length and work[name] <= most]:
            break
    else:
        near = [name for name in has if work[name] <= least + (more if session else unseen)]
    chosen = policy.choose(workers, held, slack, session, shared)
    assert chosen.boot in near
    if session is None:
        idle = min(work[name] for name in near) + unseen
        ranks = {one.boot: (max(idle, work[one.boot]), one.dispatched) for one in workers}
        assert ranks[chosen.boot] == min(ranks[name] for name in near)


@pytest.mark.parametrize(
    ("tokens", "elsewhere", "shared", "worth"),
    [
        (100, 0, 0, policy.LEAD_PRICE * 100),  # a short lead is soon gone
        (8192, 0, 8192, policy.LEAD_TOKENS),
        (60_000, 0, 0, policy.RECOMPUTE_PRICE * 60_000),
        (60_000, 0, 99_999, policy.SHARED_PRICE * 60_000),  # a head of many, which is soon as useful elsewhere
        (60_000, 40_000, 50_000, policy.SHARED_PRICE * 10_000 + policy.RECOMPUTE_PRICE * 10_000),
    ],
)
def test_a_request_waits_for_what_computing_again_would_cost(tokens, elsewhere, shared, worth):
    assert policy.worth_waiting(tokens, elsewhere, shared) == worth


def test_a_conversation_stays_at_its_worker_and_one_that_goes_moves_no_other():
    workers = [worker(name) for name in "abcde"]
    keys = [f"session {number} \ud800" for number in range(50)]
    before = {key: policy.choose(workers, {}, 8, key).boot for key in keys}
    assert set(before.values()) == set("abcde")
    after = {key: policy.choose(workers[1:], {}, 8, key).boot for key in keys}
    assert all(after[key] == before[key] for key in keys if before[key] != "a")
