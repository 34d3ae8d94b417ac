"""How the plugin sees vLLM's requests: where their chunks end, which keys their states need, what they have to do."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from engine_patches.forward.segments import _levels
from engine_patches.forward.step_writes import Write
from engine_patches.scheduler import counters, held_keys, load
from engine_patches.scheduler.chunks import end_chunk, next_stop, no_short_replay, run_to_the_budget
from engine_patches.scheduler.counters import REPORT_INTERVAL, AdmittedRequest, Counters, DraftedRequest
from engine_patches.scheduler.grid import Grid
from engine_patches.scheduler.held_keys import HeldKeys, watch_removed_keys
from engine_patches.scheduler.request_state import RequestState, Wish
from engine_patches.scheduler.transfers import TAKEN, Transfers


@pytest.mark.parametrize("grid", [Grid(16, 16), Grid(16, 64)])
@pytest.mark.parametrize(("prompt", "tokens"), [(250, 250), (100, 250)])  # the second one was preempted
def test_a_chunk_ends_where_a_state_can_lie_or_with_all_that_is_known(grid, prompt, tokens):
    request = SimpleNamespace(num_prompt_tokens=prompt, num_tokens=tokens)
    for start in range(0, tokens, 6):
        for wanted in range(1, tokens - start + 1):
            end = start + run_to_the_budget(request, start, wanted, grid)
            reaches_the_end = start + wanted >= max(prompt, tokens - 1)  # the last token is a step's own
            aligned = [each for each in range(0, start + wanted + 1, grid.alignment) if each > start]
            assert end == (start + wanted if reaches_the_end or not aligned else aligned[-1])


@pytest.mark.parametrize(
    ("start", "wanted", "tokens"),
    [(96, 4, 4), (100, 4, 1), (100, 2, 1), (100, 0, 0), (100, 5, 5), (397, 3, 1), (399, 4, 4)],
)
def test_a_replay_beside_drafts_is_no_shorter_than_a_row_of_drafts(start, wanted, tokens):
    request = SimpleNamespace(num_prompt_tokens=100, num_tokens=400)
    assert no_short_replay(request, start, wanted, verified=4) == tokens
    assert no_short_replay(request, start, wanted, verified=1) == wanted


@pytest.mark.parametrize(
    ("wish", "junction", "per_pass", "stops"),
    [
        (Wish((160, 464)), 0, 100, {0: 160, 159: 160, 160: 464, 463: 464, 464: 0, 900: 0}),
        (Wish((160, 464)), 0, 160, {0: 160}),
        (Wish((160, 464)), 0, 161, {0: 464}),
        (Wish((464,), learned=160), 0, 100, {0: 160, 48: 160, 64: 464, 160: 464}),  # a pass behind the start
        (Wish((464,)), 400, 0, {0: 384, 384: 464}),  # vLLM's own, floored to its block
    ],
)
def test_a_cut_is_made_at_the_next_position_that_is_worth_a_pass(wish, junction, per_pass, stops):
    state = RequestState(wish, upstream_junction=junction)
    assert {start: next_stop(state, start, 384, per_pass) for start in stops} == stops


class Scheduler:
    """As much of vLLM's scheduler as splits a prompt into chunks; `seen`: what vLLM's own split is given."""

    def __init__(
        self, wish: Wish, *, inside: bool = False, states: bool = True, error: Exception | None = None
    ) -> None:
        self.seen: list[Any] = []
        self.expected: list[int] = []
        self.error = error
        self.seamark = SimpleNamespace(
            writes_in_forward=inside,
            states=SimpleNamespace() if states else None,
            step_time=SimpleNamespace(tokens_per_pass=0.0),
            state_of=lambda request: request.seamark,
            grid=Grid(16, 16),
            verified=4,
            expect_states=lambda request, start: self.expected.append(start),
        )
        self.cache_config = SimpleNamespace(block_size=384)
        self.mamba_shared_prefix_checkpoint, self.mamba_partial_cache_hit = inside, True
        self.request = SimpleNamespace(
            num_computed_tokens=0,
            num_prompt_tokens=1000,
            num_tokens=1000,
            shared_prefix_boundary=400,
            seamark=RequestState(wish),
        )

    def _own_split(self, request: Any, tokens: int, *found: int) -> int:
        fine = self.mamba_partial_cache_hit, self.mamba_shared_prefix_checkpoint
        self.seen.append((*fine, request.shared_prefix_boundary, tokens, *found))
        if self.error is not None:
            raise self.error
        return tokens

    def split(self, tokens: int, *found: int, **request: int) -> int:
        before = self.mamba_partial_cache_hit, self.mamba_shared_prefix_checkpoint
        vars(self.request).update(request)
        try:
            return end_chunk(Scheduler._own_split)(self, self.request, tokens, *found)
        except ValueError:
            return -1
        finally:
            assert (self.mamba_partial_cache_hit, self.mamba_shared_prefix_checkpoint) == before
            assert self.request.seamark.chunk_start == self.request.num_computed_tokens + sum(found)


@pytest.mark.parametrize("error", [None, ValueError("split")])
def test_a_chunk_is_cut_at_each_hinted_position_where_states_are_not_written_inside_a_pass(error):
    hinted = Scheduler(Wish((160, 464), hinted=True), error=error)
    hinted.split(1000)
    hinted.split(700, 50, 20, num_computed_tokens=100)  # what was found elsewhere counts as computed
    hinted.split(536, num_computed_tokens=464)
    hinted.split(616, num_computed_tokens=384, shared_prefix_boundary=790)  # what vLLM notices later is a stop
    hinted.split(1, num_computed_tokens=1000)
    stops = [seen[1:3] for seen in hinted.seen]
    assert stops == [(True, 160), (True, 464), (True, 0), (True, 464), (False, 464)]
    assert hinted.seen[1] == (True, True, 464, 700, 50, 20)
    later = Scheduler(Wish((800,), hinted=True), error=error)
    later.split(616, num_computed_tokens=384, shared_prefix_boundary=790)
    assert later.seen == [(True, True, 768, 616, 0, 0)]
    for wish, states, seen in ((Wish(hinted=True), True, (False, 400)), (Wish((160,)), False, (False, 160))):
        scheduler = Scheduler(wish, states=states, error=error)
        scheduler.split(1000)
        assert [each[1:3] for each in scheduler.seen] == [seen]


@pytest.mark.parametrize("error", [None, ValueError("split")])
def test_inside_a_pass_a_chunk_runs_to_the_budget_and_what_is_left_to_vllm_to_whole_blocks(error):
    inside = Scheduler(Wish((160,), hinted=True), inside=True)
    assert inside.split(500, 32) == 496 and inside.seen == [] and inside.expected == [32]
    assert inside.split(3, num_computed_tokens=1000, num_tokens=1200) == 1 and inside.expected == [32], "a replay"
    inside.split(1, num_computed_tokens=999)
    assert inside.expected == [32, 999] and inside.request.shared_prefix_boundary == 400
    left = Scheduler(Wish(left_to_vllm=True), inside=True, error=error)
    assert left.split(500, 20, 12, num_computed_tokens=100) == (500 if error is None else -1)
    assert left.seen == [(False, False, 400, 500, 32)] and left.expected == []
    if error is None:
        assert left.split(3, num_computed_tokens=1000, num_tokens=1200) == 1


class Numbers(list[int]):
    """A tensor on the CPU, as far as it is read."""

    def tolist(self) -> list[int]:
        return list(self)


FIRST, SECOND = {0: 7}, {0: 8}  # blocks by cache group


@pytest.mark.parametrize(
    ("rows", "writes", "levels"),
    [
        ([(0, 10), (32, 1)], {0: [Write(10, FIRST)]}, [([1, 0], [1, 10], [(0, FIRST)])]),  # at its end: no cut
        (
            [(0, 10), (16, 6)],
            {0: [Write(4, FIRST), Write(10, SECOND)]},
            [([0, 1], [4, 6], [(0, FIRST)]), ([0], [6], [(0, SECOND)])],
        ),
        ([(0, 8)], {0: [Write(5, FIRST), Write(5, SECOND)]}, [([0], [5], [(0, FIRST), (0, SECOND)]), ([0], [3], [])]),
        # Single tokens behind a state come first, as backends expect them, and a prompt's first token does not.
        (
            [(0, 6), (0, 1), (40, 1), (20, 6)],
            {0: [Write(5, FIRST)], 3: [Write(1, SECOND)]},
            [([2, 3, 0, 1], [1, 1, 5, 1], [(3, SECOND), (0, FIRST)]), ([0, 3], [1, 5], [])],
        ),
        ([(0, 0), (0, 4), (0, 0)], {1: [Write(2, FIRST)]}, [([1], [2], [(1, FIRST)]), ([1], [2], [])]),  # padding
    ],
)
def test_a_step_is_cut_at_the_states_it_writes(rows, writes, levels):
    """Rows are given as (tokens computed before, tokens of the chunk)."""
    starts = Numbers(sum(chunk for _, chunk in rows[:at]) for at in range(len(rows) + 1))
    ends = Numbers(before + chunk for before, chunk in rows)
    batch = SimpleNamespace(num_reqs=len(rows), query_start_loc_cpu=starts, seq_lens_cpu_upper_bound=ends)
    found = _levels(batch, writes)
    assert [(level.rows, level.lengths, sorted(level.writes, key=str)) for level in found] == [
        (rows, lengths, sorted(written, key=str)) for rows, lengths, written in levels
    ]
    assert [level.whole for level in found] == [len(levels) == 1] * len(levels)
    run: dict[int, int] = {}
    for level in found:  # each token runs once, in order
        for row, begin, length, end in zip(level.rows, level.begins, level.lengths, level.ends, strict=True):
            assert begin == starts[row] + run.get(row, 0) and end == rows[row][0] + run.get(row, 0) + length
            run[row] = run.get(row, 0) + length


KEYS, NAMES = st.sampled_from([b"a", b"b", b"c", b"d"]), st.sampled_from([b"one", b"two", b"three"])


class Watching(RuleBasedStateMachine):
    """Two watches over one pool of blocks, each of which carries a key. The model: who needs what is no more there."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks: list[bytes] = [b"a", b"a", b"b", b"c", b"d"]
        self.asked: list[bytes] = []
        self.emptied_as_a_whole()
        held = HeldKeys(self, Grid(16, 16), (), ())
        self.watches = [held.watch(), held.watch()]
        self.needs: list[dict[bytes, tuple[bytes, ...]]] = [{}, {}]

    def get_one_block(self, key: bytes) -> Any:
        self.asked.append(key)
        return key if key in self.blocks else None

    @rule()
    def emptied_as_a_whole(self) -> None:
        self.blocks.clear()
        self.cached_block_hash_to_block = SimpleNamespace(get_one_block=self.get_one_block)
        self.blocks = [b"a", b"a", b"b", b"c"]

    @rule(key=KEYS)
    def comes(self, key: bytes) -> None:
        self.blocks.append(key)

    @rule(key=KEYS)
    def goes(self, key: bytes) -> None:
        removed = (key,) if key in self.blocks else None
        if removed:
            self.blocks.remove(key)
        assert watch_removed_keys(lambda *_: removed)(self, None) == removed

    @rule(which=st.sampled_from([0, 1]), name=NAMES, keys=st.sets(KEYS, min_size=1))
    def is_needed(self, which: int, name: bytes, keys: set[bytes]) -> None:
        if name not in self.needs[which] and keys <= {*self.blocks}:
            self.watches[which].add(name, keys)
            self.needs[which][name] = tuple(keys)

    @rule(which=st.sampled_from([0, 1]), name=NAMES, most=st.integers(0, 3))
    def is_needed_no_more(self, which: int, name: bytes, most: int) -> None:
        watch, needs = self.watches[which], self.needs[which]
        if name in needs:
            watch.remove(name)
            del needs[name]
        oldest = next(iter(needs)) if len(needs) > most else None
        assert watch.remove_oldest(most) == oldest
        needs.pop(oldest or b"", None)

    @rule(which=st.sampled_from([0, 1]))
    def nothing_is(self, which: int) -> None:
        self.watches[which].clear()
        self.needs[which].clear()

    @rule(which=st.sampled_from([0, 1]))
    def looks(self, which: int) -> None:
        watch, needs, self.asked = self.watches[which], self.needs[which], []
        lost = [name for name, keys in needs.items() if not {*keys} <= {*self.blocks}]
        assert sorted(watch.lost()) == sorted(lost) and not watch.emptied
        assert {*self.asked} <= {key for keys in needs.values() for key in keys}, "no more than what is needed"
        for name in lost:
            del needs[name]
        self.asked.clear()
        assert watch.lost() == [] and not self.asked, "once"

    @invariant()
    def each_knows_its_own(self) -> None:
        for watch, needs in zip(self.watches, self.needs, strict=True):
            assert len(watch) == len(needs) and all(name in watch for name in needs)


Watching.TestCase.settings = settings(max_examples=80, stateful_step_count=30)
TestWatching = Watching.TestCase


@pytest.mark.parametrize(
    ("grid", "position", "keys"),
    [
        (Grid(16, 16), 80, ["80 in 4", "80 in 2", "64 in 1", "80 in 1", "32 in 3", "64 in 3", "80 in 3"]),
        (Grid(16, 16), 64, ["64 in 4", "64 in 2", "64 in 1", "32 in 3", "64 in 3"]),
        # Where a draft head has rows, keys reach a unit further.
        (Grid(16, 16, 16, 16), 48, ["48 in 4", "48 in 2", "64 in 1", "32 in 3", "48 in 3"]),
    ],
)
def test_a_state_needs_its_own_keys_in_all_groups_and_those_of_all_rows_before_it(grid, position, keys, monkeypatch):
    def manager(group: int, block_size: int, **more: bool) -> SimpleNamespace:
        return SimpleNamespace(kv_cache_group_id=group, block_size=block_size, **more)

    monkeypatch.setattr(held_keys, "key_at", lambda request, position, unit, group: f"{position} in {group}")
    there: set[str] = set(keys)
    blocks = SimpleNamespace(get_one_block=lambda key: key if key in there else None)
    pool = SimpleNamespace(cached_block_hash_to_block=blocks)
    held = HeldKeys(pool, grid, [manager(4, 64), manager(2, 64)], [manager(1, 64), manager(3, 32, use_eagle=False)])
    assert list(held.keys_of(None, position)) == keys and held.found(None, position) == tuple(keys)
    assert held.state_key(None, position) == keys[0] and held.groups == {1, 2, 3, 4}
    assert held.name_of(None, position) == f"{position + grid.drop} in 4"
    for missing in keys:
        there = {*keys} - {missing}
        assert held.found(None, position) == () and held.is_cached(None, position) is (missing not in keys[:2])
    alone = HeldKeys(pool, Grid(16, 16), [manager(0, 64)], [])  # without attention
    assert alone.drop == 0 and list(alone.keys_of(None, 80)) == ["80 in 0"] == [alone.name_of(None, 80)]


def sent(told: Any = None, computed: int = 0, params: bool = True) -> SimpleNamespace:
    extra = None if told is None else {load.FIELD: told}
    sampling = SimpleNamespace(extra_args=extra) if params else None
    return SimpleNamespace(sampling_params=sampling, num_prompt_tokens=1000, num_computed_tokens=computed)


@pytest.mark.parametrize(
    ("requests", "loads"),
    [
        ([], {}),
        ([sent("ab,1000,400"), sent("ab,1000,400", 700), sent()], {"ab": (2, 700), "": (1, 1000)}),
        ([sent("ab,1000,400", 16), sent("ab,1000,400", 1007)], {"ab": (2, 984)}),  # the engine has looked, or generates
        ([sent("ab,9,99999")], {"ab": (1, 1000)}),  # no more than the prompt has
        ([sent(params=False)], {"": (1, 1000)}),
        *(([sent(told)], {"": (1, 1000)}) for told in ("", "a,1", "a,1,-1", "a,1,1,1", "x y,1,1", "A,1,1", 7, ["a"])),
        *(([sent(told)], {"": (1, 1000)}) for told in ("a" * 33 + ",1,1", "a,1,999999999", "a,1,\u0661")),
    ],
)
def test_each_gateway_has_its_requests_and_what_is_left_of_their_prompts(requests, loads):
    assert load.of_gateways(requests) == loads == load.of_gateways(requests)


@pytest.mark.parametrize(
    ("new", "tokens", "drafts", "may"),
    [
        ([], {"a": 1}, {}, False),
        ([], {"a": 3}, {"a": [5, 6]}, False),
        ([], {"a": 64}, {}, True),
        (["a"], {"a": 1}, {}, True),
    ],
)
def test_loads_are_added_up_where_a_step_may_have_changed_them(new, tokens, drafts, may):
    planned = SimpleNamespace(
        scheduled_new_reqs=new,
        scheduled_spec_decode_tokens=drafts,
        total_num_scheduled_tokens=sum(tokens.values()),
        num_scheduled_tokens=tokens,
    )
    assert load.may_have_changed(planned) is may and load.may_have_changed(None)


ADMITTED, DRAFTED = AdmittedRequest("r", "hit", 160, 176, (163, 0)), DraftedRequest("r", 5, 2)


@pytest.mark.parametrize(
    ("count", "counts"),
    [
        (lambda counted: counted.state_written("tail"), {"written": {"tail": 2}}),
        (lambda counted: counted.hint_ignored("malformed"), {"ignored": {"malformed": 2}}),
        (lambda counted: counted.request_admitted(ADMITTED), {"outcomes": {"hit": 2}, "requests": [ADMITTED] * 2}),
        (lambda counted: counted.follower_not_held(), {"followers": {"not_worth_it": 2}}),
        (lambda counted: counted.follower_released(0.5), {"followers": {"held": 2}, "spent_seconds": 1.0}),
        (lambda counted: counted.prompt_pinned("r", "pinned"), {"pinned": [("r", "pinned")] * 2}),
        (lambda counted: counted.request_drafted(DRAFTED), {"drafted": [DRAFTED] * 2}),
        (lambda counted: counted.cache_hit(16), {"cache_hit_tokens": 32}),
        (lambda counted: counted.load_declined(), {"loads_declined": 2}),
        (
            lambda counted: counted.disk_used({"damaged": 1}, 50, 7),
            {"files_refused": {"damaged": 2}, "file_bytes": 100},
        ),
    ],
)
def test_what_is_counted_makes_a_report_due_and_is_reported_once_and_otherwise_time_does(count, counts, monkeypatch):
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr(counters.time, "monotonic", lambda: clock.now)
    counted = Counters()
    assert counted.report_due, "nothing was reported yet"
    counted.take()
    for _ in range(2):
        count(counted)
        counted.window_found("r", "held")
        counted.resumed(160, 0.5, True)
        counted.resumed(320, 0.25, False)
        assert counted.report_due
    empty = vars(counters.Counts()) | {"windows": {"held": 2}, "window_of": [("r", "held")] * 2}
    empty |= {"hits": 2, "hit_tokens": 320, "saved_seconds": 1.5, **counts}
    found = {
        name: list(value) if hasattr(value, "appendleft") else value for name, value in vars(counted.take()).items()
    }
    assert found == {name: list(value) if hasattr(value, "appendleft") else value for name, value in empty.items()}
    assert not counted.report_due and counted.disk_bytes == (7 if "file_bytes" in counts else 0)
    clock.now += REPORT_INTERVAL
    assert counted.report_due and counted.take().empty
    for _ in range(counters.MAX_REQUESTS + 10):
        count(counted)
    assert all(len(kept) <= counters.MAX_REQUESTS for kept in vars(counted.take()).values() if hasattr(kept, "maxlen"))


def test_a_transfer_is_anothers_only_once_another_has_taken_it():
    """Whoever leaves before it was looked at has that worker told, which would hold its blocks in vain."""
    offer: dict[str, Any] = {"remote_block_ids": [[1]], "remote_engine_id": "p", "remote_request_id": "c"}
    offer |= {"remote_host": "h", "remote_port": 1}
    transfers = Transfers(SimpleNamespace(state_of=lambda request: request), SimpleNamespace())
    first, second = SimpleNamespace(loaded=0), SimpleNamespace(loaded=0)
    assert not transfers.is_anothers(first, offer)
    transfers.look_at(first, offer)
    assert transfers.is_anothers(second, offer) and transfers.look_at(second, offer) == TAKEN
    assert not transfers.is_anothers(second, {**offer, "remote_request_id": "cmpl-2"})
