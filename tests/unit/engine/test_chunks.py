"""Where a prefill chunk ends."""

from types import SimpleNamespace

import pytest

from engine_patches.scheduler.chunks import end_chunk, next_stop
from engine_patches.scheduler.grid import Grid
from engine_patches.scheduler.request_state import RequestState, Wish

GRID = Grid(16, 16)


def request(prompt, junction=0, tokens=None):
    return SimpleNamespace(num_prompt_tokens=prompt, num_tokens=tokens or prompt, shared_prefix_boundary=junction)


def test_a_cut_at_a_learned_position_has_to_save_a_pass_beyond_where_the_chunk_starts():
    learned = RequestState(Wish((464,), learned=160))
    stops = [next_stop(learned, start, 384, tokens_per_pass=100) for start in (0, 48, 64, 160)]
    assert stops == [160, 160, 464, 464]


def test_vllms_own_junction_stays_a_stop_floored_to_its_block():
    hint = RequestState(Wish((464,)), upstream_junction=400)
    assert next_stop(hint, 0, 384, 0) == 384
    assert next_stop(hint, 384, 384, 0) == 464


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


def test_requests_without_a_hint_are_split_as_vllm_splits_them():
    scheduler = Scheduler(enabled=True)
    scheduler.split(1000)
    assert scheduler.seen == [(False, 400)]


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
