"""Where a prefill chunk ends."""

from types import SimpleNamespace

import pytest

from engine_patches.scheduler.chunks import end_chunk, next_stop, no_short_replay, run_to_the_budget
from engine_patches.scheduler.grid import Grid
from engine_patches.scheduler.request_state import RequestState, Wish

GRID = Grid(16, 16)


def request(prompt, junction=0, tokens=None):
    return SimpleNamespace(num_prompt_tokens=prompt, num_tokens=tokens or prompt, shared_prefix_boundary=junction)


def test_a_chunk_that_reaches_the_prompts_end_is_left_alone():
    assert run_to_the_budget(request(250), 0, 250, GRID) == 250
    assert run_to_the_budget(request(250), 48, 202, GRID) == 202


def test_a_chunk_in_between_ends_where_a_state_could_be_placed():
    assert run_to_the_budget(request(1000), 0, 100, GRID) == 96
    assert run_to_the_budget(request(1000), 96, 100, Grid(16, 64)) == 96


def test_a_budget_below_the_unit_still_makes_progress():
    assert run_to_the_budget(request(1000), 0, 10, GRID) == 10
    assert run_to_the_budget(request(1000), 10, 10, GRID) == 6


def test_the_last_token_of_what_is_known_is_no_chunk_of_its_own():
    """It is what a step that generates begins with."""
    assert run_to_the_budget(request(100, tokens=250), 0, 249, GRID) == 249
    assert run_to_the_budget(request(100, tokens=250), 0, 248, GRID) == 240
    assert run_to_the_budget(request(250), 0, 249, GRID) == 240


def test_a_resumed_request_is_split_over_its_own_output_too():
    assert run_to_the_budget(request(100, tokens=400), 0, 200, GRID) == 192


@pytest.mark.parametrize(
    ("start", "wanted", "tokens"),
    [
        (96, 4, 4),  # a prompt's
        (100, 4, 1),
        (100, 2, 1),
        (100, 1, 1),
        (100, 0, 0),
        (100, 5, 5),
        (397, 3, 1),
        (399, 4, 4),  # the last known token, and three drafts
    ],
)
def test_a_replay_beside_drafts_is_no_shorter_than_a_row_of_drafts(start, wanted, tokens):
    assert no_short_replay(request(100, tokens=400), start, wanted, verified=4) == tokens
    assert no_short_replay(request(100, tokens=400), start, wanted, verified=1) == wanted


def test_a_cut_is_made_at_the_next_position_that_is_worth_a_pass():
    hint = RequestState(Wish((160, 464)))
    stops = [next_stop(hint, start, 384, tokens_per_pass=100) for start in (0, 159, 160, 463, 464, 900)]
    assert stops == [160, 160, 464, 464, 0, 0]
    assert next_stop(hint, 0, 384, tokens_per_pass=200) == 464


def test_a_cut_at_a_learned_position_has_to_save_a_pass_beyond_where_the_chunk_starts():
    learned = RequestState(Wish((464,), learned=160))
    stops = [next_stop(learned, start, 384, tokens_per_pass=100) for start in (0, 48, 64, 160)]
    assert stops == [160, 160, 464, 464]


def test_vllms_own_junction_stays_a_stop_floored_to_its_block():
    hint = RequestState(Wish((464,)), upstream_junction=400)
    assert next_stop(hint, 0, 384, 0) == 384
    assert next_stop(hint, 384, 384, 0) == 464


def test_a_position_of_just_a_pass_is_worth_a_stop():
    state = RequestState(Wish((160, 464)))
    assert next_stop(state, 0, 384, tokens_per_pass=160) == 160
    assert next_stop(state, 0, 384, tokens_per_pass=161) == 464


class Scheduler:
    """As much of vLLM's scheduler as splits a prompt into chunks; records what vLLM's own split would see."""

    def __init__(self, *, enabled: bool, positions: tuple[int, ...] = (), error: Exception | None = None) -> None:
        self.seamark = SimpleNamespace(
            writes_in_forward=False,
            states=SimpleNamespace() if enabled else None,
            step_time=SimpleNamespace(tokens_per_pass=0.0),
            state_of=lambda request: request.seamark,
        )
        self.cache_config = SimpleNamespace(block_size=384)
        self.mamba_shared_prefix_checkpoint = False
        self.request = SimpleNamespace(
            num_computed_tokens=0,
            num_prompt_tokens=1000,
            shared_prefix_boundary=400,
            seamark=RequestState(Wish(positions, hinted=True)),
        )
        self.seen: list[tuple[bool, int]] = []
        self._error = error

    def own_split(self, request, num_new_tokens, *_):
        self.seen.append((self.mamba_shared_prefix_checkpoint, request.shared_prefix_boundary))
        if self._error is not None:
            raise self._error
        return num_new_tokens

    def split(self, tokens: int) -> int:
        return end_chunk(Scheduler.own_split)(self, self.request, tokens)


def test_stops_inside_a_block_are_allowed_for_one_hinted_request_only():
    scheduler = Scheduler(enabled=True, positions=(160, 464))
    assert scheduler.split(1000) == 1000
    assert scheduler.seen == [(True, 160)] and scheduler.mamba_shared_prefix_checkpoint is False
    scheduler.request.num_computed_tokens = 160
    scheduler.split(840)
    scheduler.request.num_computed_tokens = 464
    scheduler.split(536)
    assert scheduler.seen[1:] == [(True, 464), (True, 0)]


def test_what_vllm_notices_later_becomes_a_stop():
    scheduler = Scheduler(enabled=True, positions=(800,))
    scheduler.split(1000)
    scheduler.request.num_computed_tokens = 384
    scheduler.request.shared_prefix_boundary = 790
    scheduler.split(616)
    assert scheduler.seen == [(True, 384), (True, 768)]


def test_the_flag_is_put_back_when_vllms_split_fails():
    scheduler = Scheduler(enabled=True, positions=(160,), error=ValueError("split"))
    with pytest.raises(ValueError, match="split"):
        scheduler.split(1000)
    assert scheduler.mamba_shared_prefix_checkpoint is False


def test_requests_without_a_hint_are_split_as_vllm_splits_them():
    scheduler = Scheduler(enabled=True)
    scheduler.split(1000)
    assert scheduler.seen == [(False, 400)]


def test_a_prompt_that_is_computed_or_wishes_nothing_is_split_as_vllm_splits_it():
    for changed in ({"num_computed_tokens": 1000}, {"seamark": RequestState(Wish(hinted=True))}):
        scheduler = Scheduler(enabled=True, positions=(160,))
        vars(scheduler.request).update(changed)
        scheduler.split(100)
        assert scheduler.seen == [(False, 400)]


def test_what_was_found_elsewhere_counts_as_computed():
    scheduler = Scheduler(enabled=True, positions=(160, 464))
    given: list[tuple[int, ...]] = []

    def own_split(self, request, *numbers):
        given.append(numbers)
        return numbers[0]

    scheduler.request.num_computed_tokens = 100
    assert end_chunk(own_split)(scheduler, scheduler.request, 700, 50, 20) == 700
    assert given == [(700, 50, 20)] and scheduler.request.seamark.chunk_start == 170
    assert scheduler.request.shared_prefix_boundary == 464  # the next one behind 170


def test_a_position_of_a_hint_where_states_cannot_be_kept_is_a_stop_between_blocks_alone():
    scheduler = Scheduler(enabled=False, positions=(160,))
    scheduler.split(1000)
    assert scheduler.seen == [(False, 160)]


class Inside(Scheduler):
    """Of a model that writes its states inside a pass; whoever shares a prefix is told what is expected."""

    def __init__(self, *, verified: int = 1, **how) -> None:
        super().__init__(enabled=True, positions=(160,), **how)
        self.expected: list[int] = []
        vars(self.seamark).update(
            writes_in_forward=True,
            grid=GRID,
            verified=verified,
            expect_states=lambda request, start: self.expected.append(start),
        )
        self.mamba_partial_cache_hit = True
        self.request.num_tokens = 1000

    def own_split(self, request, num_new_tokens, *found):
        self.seen.append((self.mamba_partial_cache_hit, self.mamba_shared_prefix_checkpoint, num_new_tokens, *found))
        if self._error is not None:
            raise self._error
        return num_new_tokens


def test_inside_a_pass_a_chunk_runs_to_the_budget_whatever_is_hinted():
    scheduler = Inside()
    assert end_chunk(Inside.own_split)(scheduler, scheduler.request, 500, 32) == 496  # to 528
    assert scheduler.seen == [] and scheduler.expected == [32] and scheduler.request.seamark.chunk_start == 32
    assert scheduler.request.shared_prefix_boundary == 400


def test_a_prompt_that_is_computed_is_waited_for_by_nobody():
    scheduler = Inside(verified=4)
    scheduler.request.num_computed_tokens, scheduler.request.num_tokens = 1000, 1200
    assert end_chunk(Inside.own_split)(scheduler, scheduler.request, 3) == 1  # a short replay
    assert scheduler.expected == []
    scheduler.request.num_computed_tokens = 999
    end_chunk(Inside.own_split)(scheduler, scheduler.request, 1)
    assert scheduler.expected == [999]


@pytest.mark.parametrize("error", [None, ValueError("split")])
def test_a_request_that_is_left_to_vllm_is_split_in_whole_blocks(error):
    scheduler = Inside(verified=4, error=error)
    scheduler.mamba_shared_prefix_checkpoint = True
    scheduler.request.seamark = RequestState(Wish(left_to_vllm=True))
    scheduler.request.num_computed_tokens = 100
    split = end_chunk(Inside.own_split)
    if error is None:
        assert split(scheduler, scheduler.request, 500, 20, 12) == 500
    else:
        with pytest.raises(ValueError, match="split"):
            split(scheduler, scheduler.request, 500, 20, 12)
    assert scheduler.seen == [(False, False, 500, 32)] and scheduler.expected == []
    assert scheduler.mamba_partial_cache_hit and scheduler.mamba_shared_prefix_checkpoint
    assert scheduler.request.seamark.chunk_start == 132


def test_a_replay_of_a_request_that_is_left_to_vllm_is_no_row_of_drafts_either():
    scheduler = Inside(verified=4)
    scheduler.request.seamark = RequestState(Wish(left_to_vllm=True))
    scheduler.request.num_computed_tokens, scheduler.request.num_tokens = 1000, 1200
    assert end_chunk(Inside.own_split)(scheduler, scheduler.request, 3) == 1
