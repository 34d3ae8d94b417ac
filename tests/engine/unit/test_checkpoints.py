"""What is learnt of a request at first sight, which of its states end a turn, and what its admission reports."""

from __future__ import annotations

import itertools
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.utils.hashing import sha256
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import init_none_hash

from engine_patches.scheduler import states
from engine_patches.scheduler.checkpoints import Checkpoints
from engine_patches.scheduler.grid import Grid
from engine_patches.scheduler.held_keys import HeldKeys
from engine_patches.scheduler.hints import FIELD, PIN
from engine_patches.scheduler.pins import Pins
from engine_patches.scheduler.planner import EDGE, EXPECTED, HINTED, LEARNED, SPARE, TAIL, CheckpointTarget
from engine_patches.scheduler.reasons import COLD, HINT_IGNORED, HIT, NO_BOUNDARY, NOT_WORTH_IT
from engine_patches.scheduler.refusals import Refusal
from engine_patches.scheduler.retention import Retention
from engine_patches.scheduler.states import States
from engine_patches.scheduler.step_time import StepTime

UNIT = 16

GRID = Grid(UNIT, UNIT)


def request(tokens, hint=None, salt="", name="r", hashed=None, **more) -> Any:
    """As much of a vLLM `Request` as is looked at; `hashed`: tokens whose hashes are there, all if None."""
    ids = list(tokens)
    ends = range(UNIT, (len(ids) if hashed is None else hashed) + 1, UNIT)
    return SimpleNamespace(
        request_id=name,
        prompt_token_ids=ids,
        num_prompt_tokens=len(ids),
        num_tokens=len(ids),
        shared_prefix_boundary=0,
        sampling_params=SimpleNamespace(extra_args=None if hint is None else {FIELD: hint}),
        block_hashes=[repr((salt, ids[:end])).encode() for end in ends],
        **more,
    )


def own(number, length):
    return [number * 10_000 + index for index in range(length)]


HEAD = own(0, 200)


def made(grid: Grid = GRID, *, in_pass: bool = False) -> Checkpoints:
    """Of a scheduler with one recurrent cache group."""
    init_none_hash(sha256)
    pool = BlockPool(64, enable_caching=True, hash_block_size=UNIT)
    recurrent = SimpleNamespace(kv_cache_group_id=0, block_size=512)
    return Checkpoints(grid, 512, States(HeldKeys(pool, grid, [recurrent], []), Pins(pool, 0), in_pass))


@pytest.fixture
def checkpoints() -> Checkpoints:
    return made()


def test_the_second_request_learns_where_it_leaves_the_first(checkpoints):
    first = checkpoints.state_of(request(HEAD + own(1, 300))).wish
    second = checkpoints.state_of(request(HEAD + own(2, 300))).wish
    assert (first.shared, first.learned, second.shared, second.learned) == (0, 0, 192, 192)
    assert second.positions == (192,) and not second.hinted


def test_a_request_is_looked_at_once(checkpoints):
    again = request(HEAD)
    assert checkpoints.state_of(again) is checkpoints.state_of(again)
    assert checkpoints.state_of(again).wish.shared == 0


@pytest.mark.parametrize("hint", [None, [64]])
def test_targets_follow_a_prompt_that_grows_and_a_junction_that_moves(checkpoints, hint):
    growing = request(own(1, 600), hint)
    before = checkpoints.targets(growing)
    assert checkpoints.targets(growing) == before
    growing.num_prompt_tokens = 900
    grown = checkpoints.targets(growing)
    assert grown != before and grown[-1].position == 896
    growing.shared_prefix_boundary = 320
    moved = [target.position for target in checkpoints.targets(growing)]
    assert (320 in moved) is (hint is None)
    state = checkpoints.state_of(growing)
    state.wish = replace(state.wish, worthless_turn=896)
    assert checkpoints.targets(growing)[-1].position < 896


def test_little_in_common_is_shared_but_not_kept(checkpoints):
    checkpoints.state_of(request(HEAD[:120] + own(1, 300)))
    assert checkpoints.state_of(request(HEAD[:120] + own(2, 300))).wish.shared == 112
    assert checkpoints.state_of(request(HEAD[:120] + own(3, 300))).wish.learned == 0


def test_at_least_128_tokens_are_kept(checkpoints):
    checkpoints.state_of(request(HEAD[:128] + own(1, 300)))
    assert checkpoints.state_of(request(HEAD[:128] + own(2, 300))).wish.learned == 128


@pytest.mark.parametrize(
    ("hint", "learned"),
    [
        ([191], 192),
        ([192], 0),
        ([200], 0),
        ([223], 0),
        ([224], 192),
        ([-300], 0),
        (["last:199"], 0),
        (["last:7,9"], 192),
    ],
)
def test_a_hinted_position_at_the_parting_serves_in_its_place(checkpoints, hint, learned):
    checkpoints.state_of(request(HEAD + own(1, 300)))
    assert checkpoints.state_of(request(HEAD + own(2, 300), hint)).wish.learned == learned


def test_other_salts_share_nothing(checkpoints):
    checkpoints.state_of(request(HEAD, salt="one"))
    assert checkpoints.state_of(request(HEAD, salt="another")).wish.shared == 0


def test_the_same_prompt_again_is_kept_where_it_can_resume(checkpoints):
    checkpoints.state_of(request(HEAD[:160]))
    again = checkpoints.state_of(request(HEAD[:160])).wish
    assert (again.shared, again.learned) == (160, 144)  # its last token is always computed


def test_a_prompt_that_goes_on_arriving_is_known_as_far_as_it_is_hashed(checkpoints):
    checkpoints.state_of(request(HEAD, hashed=144))
    assert checkpoints.state_of(request(HEAD)).wish.shared == 144


def test_hashes_of_an_answer_are_not_of_the_prompt(checkpoints):
    resumed = request(HEAD)
    resumed.num_prompt_tokens = 150
    checkpoints.state_of(resumed)
    assert checkpoints.state_of(request(HEAD)).wish.shared == 144


def test_a_prompt_below_the_unit_shares_nothing(checkpoints):
    for _ in range(2):
        assert checkpoints.state_of(request(HEAD[:9], [4])).wish.shared == 0


def test_a_pooling_request_has_no_hint_and_is_looked_at_all_the_same(checkpoints):
    pooled = request(HEAD)
    pooled.sampling_params = None
    assert not checkpoints.state_of(pooled).wish.hinted
    assert checkpoints.state_of(request(HEAD)).wish.shared == 192


def test_learned_positions_stand_where_kernels_allow_states():
    checkpoints = made(Grid(UNIT, 64))
    checkpoints.state_of(request(HEAD + own(1, 300)))
    assert checkpoints.state_of(request(HEAD + own(2, 300))).wish.learned == 192
    checkpoints.state_of(request(HEAD[:190] + own(3, 300)))
    assert checkpoints.state_of(request(HEAD[:190] + own(4, 300), [128])).wish.learned == 0  # both are 128


def test_an_engine_without_checkpoints_looks_at_nothing():
    checkpoints = Checkpoints(GRID, 512, refusal=Refusal("speculative", "drafts"))
    assert checkpoints.state_of(request(HEAD, ["last:7"])).wish.hinted
    assert checkpoints.counters.counts.ignored == {"speculative": 1}
    assert len(checkpoints.seen) == 0 and checkpoints.state_of(request(HEAD)).wish.shared == 0


def test_turns_end_at_the_tail_and_at_the_last_of_several_hinted_positions(checkpoints):
    wish = checkpoints.state_of(request(own(1, 600), [160, -20])).wish

    def ends_a_turn(position, kind, resumed_at=0):
        return checkpoints.planner.ends_a_turn(wish, CheckpointTarget(position, kind), resumed_at)

    assert [ends_a_turn(576, HINTED), ends_a_turn(592, TAIL), ends_a_turn(512, EDGE)] == [True] * 3
    assert not ends_a_turn(160, HINTED) and not ends_a_turn(320, LEARNED)
    assert ends_a_turn(320, LEARNED, 288) and not ends_a_turn(336, LEARNED, 288)


def test_what_a_conversation_passes_by_is_spare_and_a_siblings_state_is_not():
    checkpoints = made(in_pass=True)
    first = HEAD + own(1, 600)
    assert checkpoints.state_of(request(first, [200, -20])).wish.goes_on_from is None
    turns = [request(first + own(number, 600), [200, 900, -20], name=f"r{number}") for number in (2, 3)]
    spare = [
        [
            target.position
            for target in checkpoints.targets(turn)
            if checkpoints.is_spare(checkpoints.state_of(turn), target)
        ]
        for turn in turns
    ]
    goes_on, sibling = (checkpoints.state_of(turn).wish for turn in turns)
    assert goes_on.goes_on_from == (192, 768) and 192 not in spare[0] and goes_on.turn_end not in spare[0]
    assert 896 in spare[0] and 896 in goes_on.positions
    assert sibling.goes_on_from is None and 896 in sibling.positions and spare[1] == []


@pytest.mark.parametrize("idle", [True, False])
def test_what_is_spare_is_waited_for_where_there_is_room_for_it(idle):
    checkpoints, expected = made(in_pass=True), []
    checkpoints.gate = SimpleNamespace(expect=lambda request, start, positions: expected.extend(positions))
    checkpoints.states.retention = SimpleNamespace(has_idle=lambda num_blocks: idle)
    first = HEAD + own(1, 600)
    checkpoints.state_of(request(first, [200, -20]))
    turn = request(first + own(2, 600), [200, 900, -20], name="r2")
    checkpoints.expect_states(turn, 0)
    assert (896 in expected) == idle and checkpoints.state_of(turn).wish.turn_end in expected


class Kept:
    """What is said of each state that is registered; there is room for all."""

    def __init__(self) -> None:
        self.turns: list[bool] = []

    def make_room(self, num_blocks: int) -> bool:
        return True

    def add(self, key: bytes, blocks: Any, turn: bool) -> None:
        self.turns.append(turn)


@pytest.mark.parametrize(
    ("position", "kind", "turn"),
    [
        (592, TAIL, True),
        (512, EDGE, True),
        (576, HINTED, True),
        (160, HINTED, False),
        (320, LEARNED, False),
        (320, EXPECTED, True),
    ],
)
def test_a_state_is_kept_as_what_it_serves(checkpoints, position, kind, turn):
    checkpoints.states.retention = kept = Kept()
    written = request(own(1, 600), [160, -20], all_token_ids=own(1, 600))
    (block,) = checkpoints.reserve(written, CheckpointTarget(position, kind))
    assert kept.turns == [turn] and block.block_hash is not None


@pytest.mark.parametrize(
    ("start", "end", "spare"),
    [
        (0, 600, [512]),  # where vLLM alone would have left a state
        (0, 500, []),  # no block has ended
        (0, 1100, [1024]),  # of each chunk one
        (512, 1000, []),  # its start is the edge
    ],
)
def test_a_chunk_leaves_a_state_where_vllm_alone_would_have_left_one(writing, start, end, spare):
    asked = request(own(1, 1200), [160, 1100])
    assert [place for place, kind in writing.targets_in(asked, start, end) if kind == SPARE] == spare
    positions = [place for place, _ in writing.targets_in(asked, start, end)]
    assert positions == sorted(positions) and all(start < place <= end for place in positions)


def learn(checkpoints, tokens_per_pass=800.0, state=0.0):
    """From now on a pass costs as much as so many tokens, of half a millisecond each, and a state so many seconds."""
    checkpoints.step_time = StepTime()
    for tokens, wrote in itertools.product((1, 801), (0, 1, 2)):
        for _ in range(3):
            seconds = 0.0005 * (tokens_per_pass + tokens) + state * wrote
            checkpoints.step_time.step_took(tokens, seconds, states=wrote)


@pytest.mark.parametrize(("state", "spare"), [(0.0, True), (0.019, True), (0.022, False)])
def test_a_spare_state_that_is_felt_in_its_pass_is_not_written(writing, state, spare):
    asked = request(own(1, 600), [160])
    learn(writing, state=state)
    assert (SPARE in [kind for _, kind in writing.targets_in(asked, 0, 600)]) is spare


@pytest.mark.parametrize(
    ("hint", "resumed", "rate", "spare"),
    [
        ([512], 0, 0.0, False),  # it is kept for those who share it
        ([496], 0, 0.0, True),
        ([496], 0, 800.0, False),  # a hit there would not be felt
        ([160], 512, 0.0, False),  # it is there
        ([160], 496, 800.0, False),
    ],
)
def test_no_spare_state_stands_where_another_is_as_good(writing, hint, resumed, rate, spare):
    asked = request(own(1, 600), hint)
    writing.state_of(asked).resumed_at = resumed
    if rate:
        learn(writing, rate)
    assert (SPARE in [kind for _, kind in writing.targets_in(asked, 0, 600)]) is spare


def test_where_nobody_comes_back_no_spare_state_is_kept(writing):
    asked = request(own(1, 600), [160])
    writing.state_of(asked).wish = replace(writing.state_of(asked).wish, worthless_turn=592)
    assert SPARE not in [kind for _, kind in writing.targets_in(asked, 0, 600)]


def test_bytes_are_those_of_counted_states_that_are_still_cached(checkpoints):
    checkpoints.states.num_bytes, pool = 100, checkpoints.states.keys.pool
    written = request(own(1, 600), all_token_ids=own(1, 600))
    blocks = [checkpoints.reserve(written, CheckpointTarget(position, TAIL))[0] for position in (160, 320)]
    assert checkpoints.states.bytes_held == 200
    checkpoints.states.release()
    pool.reset_prefix_cache()
    assert checkpoints.states.bytes_held == 0 and not checkpoints.states.is_written(blocks[0].block_hash)


def test_the_oldest_of_too_many_states_is_counted_no_more(checkpoints, monkeypatch):
    monkeypatch.setattr(states, "MAX_WRITTEN", 2)
    for key in (b"a", b"b", b"c"):
        checkpoints.state_written(key, TAIL)
    assert [checkpoints.states.is_written(key) for key in (b"a", b"b", b"c")] == [False, True, True]
    assert checkpoints.counters.counts.written == {TAIL: 3}


def test_a_learned_state_has_to_add_to_the_one_that_was_found(checkpoints):
    state = checkpoints.state_of(request(HEAD))
    state.resumed_at = 160
    targets = [CheckpointTarget(176, LEARNED), CheckpointTarget(176, HINTED), CheckpointTarget(208, LEARNED)]
    assert all(checkpoints.worth_writing(state, target) for target in targets)  # step times are not known yet
    learn(checkpoints)  # a twentieth of a pass costs as much as 40 tokens
    assert [checkpoints.worth_writing(state, target) for target in targets] == [False, True, True]
    learn(checkpoints, state=0.1)  # as much as 200
    assert [checkpoints.worth_writing(state, target) for target in targets] == [False, False, False]


def test_a_state_of_a_prompt_that_is_pinned_is_written_whatever_it_saves(checkpoints):
    pinning, other = request(HEAD, [16], name="pins"), request(HEAD, [16], name="other")
    pinning.sampling_params.extra_args[PIN] = 1
    learn(checkpoints)
    worth = [
        checkpoints.worth_writing(checkpoints.state_of(each), CheckpointTarget(16, HINTED)) for each in (pinning, other)
    ]
    assert worth == [True, False]


def test_an_admitted_request_reports_what_it_shares_and_what_its_entries_became(checkpoints):
    checkpoints.admitted(request(HEAD + own(1, 300), name="a"), 0)
    hint = ["last:199", "last:7,9", -300, 3]
    checkpoints.admitted(request(HEAD + own(2, 300), hint, name="b"), 0)
    checkpoints.admitted(request(HEAD + own(3, 300), ["last:199"], name="c"), 192)
    unread = request(HEAD + own(4, 300), [200], name="d", skip_reading_prefix_cache=True)
    checkpoints.admitted(unread, 0)
    assert list(checkpoints.counters.take().requests) == [
        ("a", NO_BOUNDARY, 0, 0, ()),
        ("b", COLD, 0, 192, (200, 0, 200, 3)),
        ("c", HIT, 192, 192, (200,)),
        ("d", HINT_IGNORED, 0, 192, (200,)),
    ]


class Singles:
    """Questions behind one head, and nobody comes back to their answers."""

    def __init__(self, checkpoints: Checkpoints) -> None:
        self.checkpoints, self.now, self.number = checkpoints, 0.0, 0
        checkpoints.turn_value._clock = lambda: self.now

    def ask(self, length=120, before=()) -> tuple[list[int], list[int]]:
        """The prompt of a new question, behind `before` if that is given, and the positions of its states."""
        self.number += 1
        prompt = [*(before or HEAD), *own(self.number, length)]
        targets = self.checkpoints.targets(request(prompt, [192, len(prompt) - 4], name=f"r{self.number}"))
        return prompt, [target.position for target in targets]

    def end(self, count: int) -> None:
        """So many questions, each asked by a client that is gone by now."""
        for _ in range(count):
            assert self.ask()[1] == [192, 304]
            self.now += 100.0


def test_the_ends_of_turns_are_kept_until_eight_were_asked_for_by_nobody(checkpoints):
    singles = Singles(checkpoints)
    singles.end(8)
    assert singles.ask()[1] == [192]
    assert checkpoints.counters.counts.ignored["not_worth_it"] == 1


def test_without_a_hint_no_hint_is_counted_as_ignored(checkpoints):
    singles = Singles(checkpoints)
    for number in range(12):
        prompt = [*HEAD, *own(number + 1, 400)]  # longer than a block
        targets = checkpoints.targets(request(prompt, name=f"r{number}"))
        singles.now += 100.0
    assert [target.position for target in targets] == [192]
    assert not checkpoints.counters.counts.ignored


def test_a_conversation_that_goes_on_brings_the_ends_of_turns_back(checkpoints):
    singles = Singles(checkpoints)
    singles.end(8)
    prompt, positions = singles.ask()
    assert positions == [192]
    singles.ask(before=prompt)
    assert singles.ask()[1] == [192, 304]


def test_it_does_where_states_lie_farther_apart_than_a_turn_reaches():
    singles = Singles(made(Grid(UNIT, 128)))
    for _ in range(9):
        prompt, positions = singles.ask(310)  # hinted: 506 of 510, so the state is at 384
        singles.now += 100.0
    assert positions == [128]
    singles.ask(before=prompt)
    assert singles.ask(310)[1] == [128, 384]


def test_a_long_turn_is_kept_until_more_clients_are_gone(checkpoints):
    singles = Singles(checkpoints)
    singles.end(8)  # a state costs 240 tokens here, so 3,000 are worth one in twelve
    assert singles.ask(3000)[1] == [192, 3184]
    for _ in range(5):
        singles.ask()
        singles.now += 100.0
    assert singles.ask(3000)[1] == [192]


def test_the_turns_of_chats_without_a_system_prompt_are_one_heads(checkpoints):
    singles = Singles(checkpoints)

    def asked(entry, salt=None):
        singles.number += 1
        question = request(own(singles.number, 200), entry, name=f"s{singles.number}")
        question.cache_salt = salt
        singles.now += 100.0
        return [target.position for target in checkpoints.targets(question)]

    assert [asked([-5]) for _ in range(8)] == [[192]] * 8
    assert asked([-5]) == [] and asked([-5], "another tenant") == [192]
    # A place counted from the start may be the end of a system prompt, however short the question is.
    assert [asked([195]) for _ in range(9)] == [[192]] * 9


def test_prompts_that_share_nothing_keep_the_ends_of_their_turns(checkpoints):
    singles = Singles(checkpoints)
    for number in range(20):
        assert singles.ask(before=own(1000 + number, 200))[1] == [192, 304]
        singles.now += 100.0


@pytest.fixture
def writing() -> Checkpoints:
    """Before an engine that writes states inside a pass."""
    return made(in_pass=True)


def admit(checkpoints: Checkpoints, number: int, question: int, hit: int = 0, **more) -> list[CheckpointTarget]:
    """A question about a document of 640 tokens; the states that are kept of it."""
    asked = request(own(number, 640) + own(number + question, 60), name=f"{number}/{question}", **more)
    targets = checkpoints.targets(asked)
    checkpoints.admitted(asked, hit)
    return targets


def documents(checkpoints: Checkpoints, count: int = 3, **more) -> None:
    """So many, each asked about twice."""
    for number in range(100, 100 + 10 * count, 10):
        assert EXPECTED not in [kind for question in (1, 2) for _, kind in admit(checkpoints, number, question, **more)]


def test_documents_of_one_length_have_a_state_at_their_end_before_anybody_asks_again(writing):
    documents(writing)
    assert CheckpointTarget(640, EXPECTED) in admit(writing, 200, 1)
    assert CheckpointTarget(640, LEARNED) in admit(writing, 200, 2)


def test_a_hinted_state_is_as_good_as_an_expected_one(writing):
    documents(writing)
    asked = request(own(200, 700), [624, 696], name="hinted")
    assert EXPECTED not in [kind for _, kind in writing.targets(asked)]


def test_where_each_state_costs_a_pass_none_is_kept_on_a_guess(checkpoints):
    documents(checkpoints)
    assert EXPECTED not in [kind for _, kind in admit(checkpoints, 200, 1)]


def test_what_one_salt_shows_is_nothing_to_another(writing):
    documents(writing, salt="a", cache_salt="a")
    assert EXPECTED not in [kind for _, kind in admit(writing, 200, 1, salt="b", cache_salt="b")]
    assert CheckpointTarget(640, EXPECTED) in admit(writing, 200, 1, salt="a", cache_salt="a")


def test_what_was_evicted_would_have_been_evicted_there_too(writing):
    for number in range(100, 200, 10):
        first = request(own(number, 640) + own(number + 1, 60), [640], name="first")
        writing.outcomes.computed(first, 640, "evicted")
        admit(writing, number, 1)
        admit(writing, number, 2)
    assert EXPECTED not in [kind for _, kind in admit(writing, 200, 1)]


def test_an_expected_state_that_served_somebody_is_kept_as_shared_and_goes_on_to_count(writing):
    documents(writing)
    writing.states.retention = retention = Retention(writing.states.keys.pool)
    for number in range(200, 200 + 10 * 300, 10):  # more than are weighed at once
        first = request(own(number, 640) + own(number + 1, 60), name="first", all_token_ids=own(number, 640))
        (target,) = [target for target in writing.targets(first) if target.kind == EXPECTED]
        (block,) = writing.reserve(first, target)
        writing.admitted(first, 0)
        writing.states.release()
        assert block.block_hash in retention._turns
        admit(writing, number, 2, hit=640)
        assert block.block_hash in retention._kept


def drafted(checkpoints: Checkpoints, window: str = "") -> list[Any]:
    """What is counted of a request that has verified drafts twice and has its whole answer."""
    answered = request(HEAD, name="a")
    checkpoints.state_of(answered).window = window
    for accepted in (3, 0):
        checkpoints.verified_drafts(answered, accepted)
    checkpoints.finished(answered)
    checkpoints.finished(request(HEAD, name="b"))  # it has drafted nothing
    return list(checkpoints.counters.take().drafted)


def test_a_request_that_drafted_is_counted_once_it_has_its_whole_answer(checkpoints):
    assert drafted(checkpoints) == [("a", 2, 3)]
    assert drafted(Checkpoints(GRID, 512)) == [("a", 2, 3)]


@pytest.mark.parametrize(("window", "rows"), [("", True), ("held", True), ("healed", True), ("zeroed", False)])
def test_what_zeros_cost_a_heads_drafts_is_learnt_from_those_who_began_on_them(checkpoints, window, rows):
    learnt: list[tuple[bool, int, int]] = []
    acceptance = SimpleNamespace(add=lambda *told: learnt.append(told))
    checkpoints.states.windows = SimpleNamespace(acceptance=acceptance)
    drafted(checkpoints, window)
    assert learnt == [(rows, 2, 3)]


@pytest.mark.parametrize(
    ("window", "heals", "hit", "reason", "named"),
    [("held", 0, 192, HIT, 192), ("zeroed", 0, 192, HIT, 192), ("healed", 192, 64, NOT_WORTH_IT, 192)],
)
def test_what_became_of_a_heads_rows_is_told_with_the_hit(checkpoints, window, heals, hit, reason, named):
    checkpoints.state_of(request(HEAD))
    told: list[bytes] = []
    checkpoints.states.windows = SimpleNamespace(admitted=lambda state, name: told.append(name))
    again = request(HEAD + own(1, 50), [192], name="a")
    state = checkpoints.state_of(again)
    state.window, state.heals = window, heals
    checkpoints.admitted(again, hit)
    counts = checkpoints.counters.take()
    assert list(counts.window_of) == [("a", window)] and counts.outcomes == {reason: 1}
    assert told == [checkpoints.states.keys.state_key(again, named)]


def test_what_another_worker_has_computed_is_a_hit_that_saves_nothing_here(checkpoints):
    checkpoints.state_of(request(HEAD))
    loading = request(HEAD + own(1, 50), name="a")
    checkpoints.state_of(loading).loaded = 180
    checkpoints.admitted(loading, 64)
    counts = checkpoints.counters.take()
    assert list(counts.requests) == [("a", HIT, 180, 192, ())] and counts.hits == 0
    assert checkpoints.state_of(loading).resumed_at == 180


@pytest.mark.parametrize(("loaded", "written", "hits"), [(0, False, 0), (0, True, 1), (32, False, 1)])
def test_a_hit_counts_as_one_on_a_state_that_was_counted_or_loaded(checkpoints, loaded, written, hits):
    again = request(HEAD, [192], name="a")
    if written:
        checkpoints.state_written(checkpoints.states.keys.state_key(again, 192), TAIL)
    offered: list[tuple[int, bool]] = []
    checkpoints.states.store = SimpleNamespace(offer=lambda request, *told: offered.append(told))
    learn(checkpoints)
    checkpoints.admitted(again, 192, loaded)
    counts = checkpoints.counters.take()
    assert (counts.hits, counts.hit_tokens) == (hits, 192 * hits)
    assert counts.saved_seconds == pytest.approx(192 * 0.0005, rel=0.01)
    assert offered == ([] if loaded else [(192, True)])  # what a disk has brought it has already


def test_a_request_that_hits_nothing_saves_nothing(checkpoints):
    checkpoints.states.store = SimpleNamespace(offer=lambda *_: pytest.fail("offered"))
    checkpoints.admitted(request(HEAD, [192]), 0)
    counts = checkpoints.counters.take()
    assert (counts.hits, counts.saved_seconds) == (0, 0.0) and counts.outcomes == {COLD: 1}


def test_a_spare_state_is_reserved_only_where_it_puts_out_nothing(checkpoints):
    written = request(own(1, 600), [160], all_token_ids=own(1, 600))
    target = CheckpointTarget(512, SPARE)
    assert checkpoints.reserve(written, target) is None  # vLLM keeps these states, so none is known to be idle
    checkpoints.states.retention = Retention(checkpoints.states.keys.pool)
    (block,) = checkpoints.reserve(written, target)
    assert block.block_hash in checkpoints.states.retention
    checkpoints.states.release()
    assert block.block_hash not in checkpoints.states.retention  # it goes before all others
    assert checkpoints.states.keys.is_cached(written, 512)


def test_no_state_is_reserved_where_no_block_is_free_or_none_are_kept(checkpoints):
    pool, written = checkpoints.states.keys.pool, request(own(1, 600), all_token_ids=own(1, 600))
    held = pool.get_new_blocks(pool.get_num_free_blocks() - 1)
    assert checkpoints.reserve(written, CheckpointTarget(160, TAIL)) is not None  # the last one
    assert checkpoints.reserve(written, CheckpointTarget(320, TAIL)) is None
    assert checkpoints.counters.counts.written == {TAIL: 1} and held
    assert Checkpoints(GRID, 512).reserve(written, CheckpointTarget(160, TAIL)) is None


def test_a_step_begins_with_the_blocks_of_the_last_one_given_back_and_all_rows_written(checkpoints):
    written = request(own(1, 600), all_token_ids=own(1, 600))
    (block,) = checkpoints.reserve(written, CheckpointTarget(160, TAIL))
    checkpoints.states.unwritten[7] = 0
    gone: list[Any] = []
    checkpoints.gate = SimpleNamespace(drop_gone=gone.append)
    checkpoints.begin_step({"a"})
    assert block.ref_cnt == 0 and not checkpoints.states.unwritten and gone == [{"a"}]
    Checkpoints(GRID, 512).begin_step(set())  # of a model without states


def test_a_cache_that_is_emptied_is_forgotten_by_all_who_count_on_it(checkpoints):
    cleared: list[str] = []

    def part(name: str) -> SimpleNamespace:
        return SimpleNamespace(clear=lambda: cleared.append(name), close=lambda why: cleared.append(f"{name}: {why}"))

    written = request(own(1, 600), all_token_ids=own(1, 600))
    (block,) = checkpoints.reserve(written, CheckpointTarget(160, TAIL))
    states = checkpoints.states
    checkpoints.gate, states.store, states.retention, states.windows = map(part, ("gate", "store", "retention", "rows"))
    states.retention.give_up = lambda key: True
    checkpoints.before_reset()
    assert block.ref_cnt == 0
    assert sorted(cleared) == ["gate", "retention", "rows", "store: the cache is emptied"]
    Checkpoints(GRID, 512).before_reset()
