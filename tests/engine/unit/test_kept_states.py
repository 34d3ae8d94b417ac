"""States, attention rows, pins and events on vLLM's own block pool, in stories that are drawn.

The reference knows the keys of the cache, who holds which block, and in which order states may go.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test
from vllm.lora.request import LoRARequest
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.block_pool import BlockHashToBlockMap, BlockPool
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.request import Request

from engine_patches.scheduler import states
from engine_patches.scheduler.cache_keys import HeldKeys, watch_removed_keys
from engine_patches.scheduler.checkpoints import Checkpoints
from engine_patches.scheduler.hints import FIELD, PIN
from engine_patches.scheduler.hooks import release_before_reset
from engine_patches.scheduler.kv_events import ResumableBlocks
from engine_patches.scheduler.planner import HINTED, CheckpointTarget, Grid, RequestState
from engine_patches.scheduler.states import NO_ROOM, NOT_CACHED, PINNED, StateEvicted, States, StateStored
from tests.harness.kv_event_index import KvEventIndex

UNIT, BLOCK, BLOCKS = 16, 64, 40

RECURRENT, ATTENTION, WINDOW = (0, 2), 1, 7

GRID = Grid(UNIT, UNIT)

SHARE, PINNED_BLOCKS, RUNGS = 12, 14, 4  # blocks: six states, a prompt or two, two states

TOKENS = 160

ENDS = range(UNIT, TOKENS, UNIT)

# Two prompts part after 112 tokens; two are told apart by nothing but a salt or an adapter.
HEAD = list(range(112))

PROMPTS: dict[str, dict[str, Any]] = {
    "a": {"tokens": [*HEAD, *range(1000, 1048)]},
    "b": {"tokens": [*HEAD, *range(2000, 2048)]},
    "salted": {"tokens": [*HEAD, *range(1000, 1048)], "cache_salt": "other"},
    "ada": {"tokens": [*HEAD, *range(1000, 1048)], "lora_request": LoRARequest("ada", 1, "/nowhere")},
}

OTHERS: dict[str, Any] = {"tokens": [9] * BLOCKS * BLOCK}  # what fills the cache before


def request_of(name: str) -> Request:
    more = dict(PROMPTS.get(name, OTHERS))
    hasher = get_request_block_hasher(UNIT, sha256)
    return Request(name, more.pop("tokens"), SamplingParams(max_tokens=1), None, block_hasher=hasher, **more)


names, ends = st.sampled_from(list(PROMPTS)), st.sampled_from(list(ENDS))


class Cache(RuleBasedStateMachine):
    announced = UNIT  # tokens of the blocks that KV events name

    def __init__(self) -> None:
        super().__init__()
        init_none_hash(sha256)
        self.pool = BlockPool(BLOCKS, enable_caching=True, hash_block_size=UNIT, enable_kv_cache_events=True)
        *recurrent, attention = (
            SimpleNamespace(kv_cache_group_id=group, block_size=BLOCK) for group in (*RECURRENT, ATTENTION)
        )
        self.keys = HeldKeys(self.pool, GRID, recurrent, [attention])
        self.states = States(self.keys, PINNED_BLOCKS, share=SHARE / BLOCKS)
        self.retention = self.states.retention
        self.retention._rung_limit = RUNGS
        self.checkpoints = Checkpoints(GRID, BLOCK, self.states)
        ResumableBlocks(self.keys, {ATTENTION: self.announced}).take_over()
        self.index = KvEventIndex(UNIT)
        self.requests = {name: request_of(name) for name in PROMPTS}
        self.running: list[Any] = []  # blocks of requests
        self.written: list[Any] = []  # of states, until the next step
        self.spare: set[bytes] = set()
        self.rungs: set[bytes] = set()  # of the spare ones, unless they were used twice
        self.pinned: dict[str, list[Any]] = {}
        self.told: dict[str, tuple[str, int]] = {}  # names of states by events, and whose they are
        self.turns: list[bytes] = []  # states by their keys, in the order in which they may go: these first
        self.kept: list[bytes] = []
        self.uses: Counter[bytes] = Counter()
        self.before: dict[bytes, bytes] = {}  # of turns, the one before
        self.given_up: set[bytes] = set()
        self.regained: set[tuple[str, int]] = set()  # states that can be found again since others computed their rows

    # What the reference knows.

    def key(self, name: str, end: int, group: int = RECURRENT[0]) -> bytes:
        return self.requests[name].block_hashes[end // UNIT - 1] + group.to_bytes(4, "big")

    def block(self, key: bytes) -> Any:
        return self.pool.cached_block_hash_to_block.get_one_block(key)

    def needs(self, name: str, end: int) -> list[bytes]:
        """Keys without which a state is of no use: its own, and those of all rows before it."""
        edges = {*range(BLOCK, end + 1, BLOCK), end}
        return [self.key(name, end, group) for group in RECURRENT] + [
            self.key(name, edge, ATTENTION) for edge in sorted(edges)
        ]

    def found(self, name: str, end: int) -> bool:
        return all(map(self.block, self.needs(name, end)))

    def blocks_of(self, key: bytes) -> list[Any]:
        """The blocks of a state that is there in whole."""
        found = [self.block(key[:-4] + group.to_bytes(4, "big")) for group in RECURRENT]
        return found if all(found) else []

    @property
    def asked_for(self) -> list[bytes]:
        return [key for key in (*self.turns, *self.kept) if key not in self.rungs]

    def leave(self, allowed: list[bytes], *, in_order: bool = False) -> None:
        """Those that the cache has and are kept no longer are some of `allowed`, the first ones of these."""
        gone = [key for key in (*self.turns, *self.kept) if key not in self.retention and self.blocks_of(key)]
        free = [key for key in allowed if self.blocks_of(key) and not any(b.ref_cnt for b in self.blocks_of(key))]
        assert gone == free[: len(gone)] if in_order else set(gone) <= set(free)
        for key in gone:
            (self.turns if key in self.turns else self.kept).remove(key)
        self.given_up.update(gone)

    def enter(self, key: bytes, turn: bool, uses: int) -> None:
        """A state was written or used: it goes last of its kind."""
        for order in (self.turns, self.kept):
            if key in order:
                order.remove(key)
        self.given_up.discard(key)
        self.uses[key] = uses
        if not uses:
            self.before.pop(key, None)
        (self.turns if turn and uses <= 1 else self.kept).append(key)

    def settle(self, key: bytes) -> None:
        """A state was used or asked for: it is no rung any more, unless it was used once, or its share is full."""
        if not self.retention.is_rung(key):
            assert self.uses[key] > 1 or key not in self.rungs
            self.rungs.discard(key)

    # What happens.

    @initialize(is_full=st.booleans())
    def fill(self, is_full: bool) -> None:
        """With what others left."""
        if is_full:
            blocks = self.pool.get_new_blocks(BLOCKS - 1)
            self.pool.cache_full_blocks(request_of("others"), blocks, 0, len(blocks), BLOCK, ATTENTION)
            self.pool.free_blocks(blocks)

    @rule(name=names, end=st.sampled_from([64, 128]))
    def compute_rows(self, name: str, end: int) -> None:
        if self.pool.get_num_free_blocks() >= end // BLOCK:
            before = self.resumable()
            blocks = self.pool.get_new_blocks(end // BLOCK)
            self.pool.cache_full_blocks(self.requests[name], blocks, 0, end // BLOCK, BLOCK, ATTENTION)
            self.running += blocks
            self.regained |= self.resumable() - before

    @rule(name=names, end=ends, turn=st.booleans(), kind=st.sampled_from(["asked for", "spare", "rung"]))
    def write(self, name: str, end: int, turn: bool, kind: str) -> None:
        key, request, spare, rung = self.key(name, end), self.requests[name], kind != "asked for", kind == "rung"
        if key in self.retention or self.blocks_of(key):
            if not spare:
                was_turn, is_known = key not in self.kept, key in {*self.turns, *self.kept, *self.given_up}
                self.retention.claim(key)
                self.leave([each for each in self.asked_for if each != key], in_order=True)
                if key in self.rungs and is_known and self.blocks_of(key):
                    self.enter(key, was_turn, max(self.uses[key], 1))
                    self.rungs -= set() if self.retention.is_rung(key) else {key}
            return  # a state that is there is not written again
        asked_for = [block for each in self.asked_for for block in self.blocks_of(each)]
        blocks = self.states.reserve(request, end, turn, spare=spare, rung=rung)
        if rung:
            assert not {block.block_id for block in blocks or ()} & {block.block_id for block in asked_for}
        self.leave([*self.rungs] if rung else self.asked_for, in_order=not rung)
        if blocks is None:
            return
        self.written += blocks
        self.enter(key, turn, 0)
        self.rungs.discard(key)
        if spare:
            self.spare.add(key)
        if rung:
            self.rungs.add(key)
        if end % BLOCK and self.pool.get_num_free_blocks():
            (row,) = self.pool.get_new_blocks(1)
            self.pool.cache_partial_block(request, row, end, ATTENTION, BLOCK)
            self.running.append(row)

    @rule(name=names, end=ends, shared=st.booleans())
    def resume(self, name: str, end: int, shared: bool) -> None:
        keys = self.keys.found(self.requests[name], end)
        assert bool(keys) == self.found(name, end)
        if keys:
            self.pool.touch([self.block(key) for key in keys])
            self.running += [self.block(key) for key in keys]
            passed = [each for each in ENDS if each < end and self.blocks_of(self.key(name, each))]
            self.states.resumed(self.requests[name], end, passed, shared=shared, stored=True)
            self.leave([each for each in (*self.turns, *self.kept) if each != self.key(name, end)])
            turn = self.key(name, end) in self.turns and not shared
            is_known = self.key(name, end) in {*self.turns, *self.kept, *self.given_up}
            for each in (end, *passed):
                key = self.key(name, each)
                if key in self.retention:
                    was_turn = turn if each == end else key in self.turns
                    self.enter(key, was_turn, self.uses[key] + (each == end))
                    self.settle(key)
            assert self.key(name, end) in self.retention or not is_known

    @rule(name=names, before=ends, end=ends, is_named=st.booleans())
    def go_on(self, name: str, before: int, end: int, is_named: bool) -> None:
        key, earlier = self.key(name, end), self.key(name, before)
        left = self.before.get(earlier) if {key, earlier} <= set(self.turns) else None
        named = [each for each in ENDS if is_named and self.key(name, each) == left]
        is_there = all(map(self.blocks_of, (key, earlier)))
        self.states.continued(self.requests[name], end, before, named)
        if {key, earlier} <= set(self.turns):
            self.before[key] = earlier
        goes = [left] if left in self.turns and not named else []
        if is_there and goes and (blocks := self.blocks_of(left)):
            assert (left in self.retention) == any(block.ref_cnt for block in blocks)
        self.leave(goes)

    @rule(name=names, ends=st.lists(ends, min_size=1, max_size=2, unique=True))
    def pin(self, name: str, ends: list[int]) -> None:
        keys = [key for end in ends if self.found(name, end) for key in self.needs(name, end)]
        blocks = {self.block(key).block_id: self.block(key) for key in keys}
        others = {each.block_id for other, held in self.pinned.items() if other != name for each in held}
        room = len(blocks.keys() | others) <= PINNED_BLOCKS
        fate = self.states.pin(self.requests[name], ends)
        assert fate == (NOT_CACHED if not blocks else PINNED if room else NO_ROOM)
        if fate == PINNED:
            self.pinned[name] = list(blocks.values())

    @rule(name=names)
    def unpin(self, name: str) -> None:
        self.states.unpin(self.requests[name])
        self.pinned.pop(name, None)

    @rule()
    def requests_end(self) -> None:
        self.pool.free_blocks(reversed(self.running))
        self.running = []

    @rule(count=st.integers(1, 12))
    def others_come(self, count: int) -> None:
        taken = self.pool.get_new_blocks(min(count, self.pool.get_num_free_blocks()))
        self.pool.free_blocks(taken)

    @rule(number=st.integers(1, BLOCKS - 1))
    def a_block_is_evicted(self, number: int) -> None:
        self.pool.evict_blocks({number})

    @rule(name=names)
    def tell(self, name: str) -> None:
        targets = [CheckpointTarget(end, HINTED) for end in ENDS]
        self.states.events.emit_stored(self.requests[name], RequestState(), targets, 0, TOKENS)

    @rule()
    def the_adapter_is_another(self) -> None:
        self.states.adapter_replaced("ada")
        self.pinned.pop("ada", None)
        self.take_state_events()
        assert not [name for name, (whose, _) in self.told.items() if whose == "ada"]

    @rule(how=st.sampled_from(["works", "fails", "breaks"]))
    def empty(self, how: str) -> None:
        def reset(_: Any) -> bool:
            if how == "breaks":
                raise RuntimeError
            return how == "works" and self.pool.reset_prefix_cache()

        emptied = False
        with contextlib.suppress(RuntimeError):
            emptied = release_before_reset(reset)(SimpleNamespace(seamark=self.checkpoints))
        assert emptied is (how == "works" and not self.running)
        self.written, self.spare, self.rungs = [], set(), set()
        self.turns, self.kept, self.given_up = [], [], set()  # whoever it may be emptied for, no state is kept on
        if emptied:
            self.pinned = {}
            self.take_state_events()
            assert self.told == {}

    @rule()
    def step(self) -> None:
        """The blocks of the last step's states are like any other, and what came and went is told."""
        self.states.begin_step()
        self.written = []
        self.leave([key for key in self.spare if key in self.rungs or not self.uses[key]])
        self.states.events.emit_evictions()
        self.take_state_events()
        lost = [name for name, whose in self.told.items() if not self.found(*whose)]
        assert lost == []
        for event in self.pool.take_events():
            self.index.apply(msgspec.to_builtins(event))
        assert self.index.surprises == []
        self.regained &= self.resumable()
        for name in ("a", "b", "salted"):
            request = self.requests[name]
            # The index knows parts of blocks; a request finds whole ones.
            found = self.index.promised(request.all_token_ids, request.cache_salt) // self.announced * self.announced
            # Nobody looks for what rows that are computed again make findable: it may be announced.
            least, most = (
                max((self.shares(name, *each) // self.announced * self.announced for each in states), default=0)
                for states in (self.resumable() - self.regained, self.resumable())
            )
            assert least <= found <= most

    def resumable(self) -> set[tuple[str, int]]:
        return {(name, end) for name in PROMPTS for end in ENDS if self.found(name, end)}

    def shares(self, name: str, other: str, end: int) -> int:
        """How many of the tokens before a state of another prompt are this prompt's too."""
        mine, theirs = (self.requests[each].block_hashes[: end // UNIT] for each in (name, other))
        return UNIT * sum(one == another for one, another in zip(mine, theirs, strict=True))

    def take_state_events(self) -> None:
        for _, event in self.states.events.take():
            if isinstance(event, StateStored):
                self.told |= {name: (event.request_id, end) for end, name in event.states if name}
            elif isinstance(event, StateEvicted):
                del self.told[event.name]
            elif isinstance(event, states.CacheCleared):
                self.told = {}
            else:
                assert event == states.AdapterReplaced("ada")

    # What holds at any time.

    @invariant()
    def each_block_is_held_by_those_who_hold_it_and_the_others_are_free(self) -> None:
        holders = Counter(each.block_id for each in (*self.running, *self.written))
        holders.update(each.block_id for blocks in self.pinned.values() for each in blocks)
        held = {each.block_id: each.ref_cnt for each in self.pool.blocks if each.ref_cnt and not each.is_null}
        free = [each.block_id for each in self.pool.free_block_queue.get_all_free_blocks()]
        assert held == holders and len(free) == self.pool.get_num_free_blocks()
        assert sorted([*free, *held]) == list(range(1, BLOCKS))

    @invariant()
    def pins_and_states_stay_within_their_shares(self) -> None:
        blocks = {each.block_id for held in self.pinned.values() for each in held}
        assert self.states.pins.num_blocks == len(blocks) <= PINNED_BLOCKS and len(self.states.pins._pins) == len(
            self.pinned
        )
        assert len(RECURRENT) * sum(not self.retention.is_rung(key) for key in (*self.turns, *self.kept)) <= SHARE

    @invariant()
    def what_was_given_up_makes_room_before_anything_of_use(self) -> None:
        free = self.pool.free_block_queue.get_all_free_blocks()
        # What a request or a pin has had since is of use to somebody.
        self.given_up = {key for key in self.given_up if all(block in free for block in self.blocks_of(key))}
        names = {key[:-4] + group.to_bytes(4, "big") for key in self.given_up for group in RECURRENT}
        of_use = [at for at, block in enumerate(free) if block.block_hash and block.block_hash not in names]
        assert all(at < min(of_use, default=BLOCKS) for at, block in enumerate(free) if block.block_hash in names)
        rungs = {key[:-4] + group.to_bytes(4, "big") for key in self.given_up & self.rungs for group in RECURRENT}
        others = [at for at, block in enumerate(free) if block.block_hash in names - rungs]
        assert all(at < min(others, default=BLOCKS) for at, block in enumerate(free) if block.block_hash in rungs)


class InWholeBlocks(Cache):
    announced = BLOCK


@pytest.fixture(autouse=True)
def watched(monkeypatch) -> None:
    patched = watch_removed_keys(BlockPool._remove_cached_block_hashes)
    monkeypatch.setattr(BlockPool, "_remove_cached_block_hashes", patched)


@pytest.mark.parametrize("cache", [Cache, InWholeBlocks])
def test_what_the_cache_keeps_and_tells_is_what_it_has_in_whatever_order_things_happen(cache):
    run_state_machine_as_test(cache, settings=settings(max_examples=100, stateful_step_count=40))


@pytest.fixture
def cache() -> Cache:
    """With rows of 128 tokens of a prompt, and states at 80 and 144."""
    made = Cache()
    made.compute_rows("a", 128)
    for end in (80, 144):
        made.write("a", end, turn=True, kind="asked for")
    return made


def test_a_state_that_is_taken_back_makes_room_for_itself(cache):
    cache.step()
    for end in ENDS[: SHARE // len(RECURRENT) - 1]:
        cache.write("salted", end, turn=True, kind="asked for")
    assert cache.key("a", 80) in cache.given_up
    cache.step()
    cache.resume("a", 80, shared=False)
    cache.pins_and_states_stay_within_their_shares()


def test_of_states_that_are_gone_no_track_is_kept(cache):
    for number in range(2 * BLOCKS):
        hasher = get_request_block_hasher(UNIT, sha256)
        one_off = Request(str(number), [number] * UNIT, SamplingParams(max_tokens=1), None, block_hasher=hasher)
        assert cache.states.reserve(one_off, UNIT, turn=True, spare=True, rung=True)
        cache.step()
    assert len(RECURRENT) * (len(cache.retention) + len(cache.retention._released)) < BLOCKS


def planned(cache: Cache, state: RequestState, start: int, end: int) -> list[Any]:
    """The events of a step with these tokens of the prompt."""
    targets = [CheckpointTarget(position, HINTED) for position in (80, 112, 144)]
    cache.states.events.emit_stored(cache.requests["a"], state, targets, start, end)
    return [event for _, event in cache.states.events.take()]


def test_each_chunk_emits_its_states_once_and_again_after_a_preemption(cache):
    state = RequestState()
    for start, end, told in ((0, 100, {80: True}), (100, 160, {112: False, 144: True}), (0, 100, {80: True})):
        (event,) = planned(cache, state, start, end)
        assert event.end == end and {at: bool(name) for at, name in event.states} == told


def test_watched_states_are_bounded_and_the_oldest_is_given_up(cache, monkeypatch):
    monkeypatch.setattr(states, "MAX_STATES", 1)
    gone, came = planned(cache, RequestState(), 0, 160)
    assert gone == StateEvicted(came.states[0][1]) and len(cache.states.events._states) == 1


def test_blocks_that_no_state_needs_are_not_looked_at(cache, monkeypatch):
    monkeypatch.setattr(BlockHashToBlockMap, "get_one_block", lambda *_: pytest.fail("looked"))
    cache.states.begin_step()
    cache.requests_end()
    cache.others_come(BLOCKS)
    cache.states.events.emit_evictions()
    assert not cache.states.events.pending


def test_kv_events_of_other_cache_groups_pass_and_a_full_report_repeats_what_is_announced(cache):
    cache.pool.take_events()
    (block,), request = cache.pool.get_new_blocks(1), cache.requests["a"]
    cache.pool.cache_full_blocks(request, [block], 0, 1, BLOCK, WINDOW)
    cache.pool.evict_blocks({block.block_id})
    for group in (*RECURRENT, ATTENTION):
        cache.pool.emit_cached_block_events(request, 2, BLOCK, group)
        cache.pool.emit_cached_block_events(cache.requests["salted"], 1, BLOCK, group)
    stored, removed, report = cache.pool.take_events()
    assert (stored.group_idx, stored.block_size, removed.group_idx) == (WINDOW, BLOCK, WINDOW)
    assert report.parent_block_hash is None and report.token_ids == request.all_token_ids[:128]


def test_the_rows_before_a_state_count_as_used_whenever_it_does(cache):
    key, request = cache.key("a", 80), cache.requests["a"]
    cache.step()
    rows, gone = cache.pool.get_new_blocks(2)
    for block, end in ((rows, 80), (gone, 144)):
        cache.pool.cache_partial_block(request, block, end, WINDOW, BLOCK)
    held = [(block, block.block_hash) for block in (rows, gone)]
    cache.retention.add_window(key, [*held, (cache.pool.null_block, rows.block_hash)])
    cache.pool.evict_blocks({gone.block_id})
    cache.pool.free_blocks([rows, gone])
    cache.retention.low[rows.block_id], cache.retention._state(key).low = rows.block_hash, True
    order = cache.pool.free_block_queue.get_all_free_blocks
    before = order()
    cache.retention.refresh([key], low=True)
    assert order() == before and cache.retention.low
    cache.retention.refresh([key], low=False)
    assert order()[-3:] == [*cache.blocks_of(key), rows] and not cache.retention.low
    cache.pool.touch([rows])
    cache.retention.refresh([key], low=False)  # a block that a request holds is in no queue
    assert rows.ref_cnt == 1


@pytest.mark.parametrize(
    ("pin", "hint", "held"), [(1, [80, 144], 8), (1, [80], 4), *((no, [80], 0) for no in ("1", 2, None, [1]))]
)
def test_of_a_pinned_prompt_the_states_are_held_that_its_hint_names_once_it_is_computed(cache, pin, hint, held):
    request, checkpoints = cache.requests["a"], cache.checkpoints
    request.sampling_params.extra_args = {FIELD: hint, PIN: pin}
    checkpoints.state_of(request)
    for computed in (0, TOKENS):
        assert cache.states.pins.num_blocks == 0
        request.num_computed_tokens = computed
        checkpoints.pin_prompts({"a": request})
    told = list(checkpoints.counters.take().pinned)
    assert told == [("a", PINNED)] * bool(held) and cache.states.pins.num_blocks == held
    checkpoints.pinning.add("gone")
    checkpoints.pin_prompts({})
    assert not checkpoints.pinning and not checkpoints.counters.counts.pinned
