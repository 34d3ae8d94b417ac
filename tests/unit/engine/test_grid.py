"""The rounding rules, against what they mean: each state one by one, and who could resume from it."""

from types import SimpleNamespace

import pytest

from engine_patches.scheduler.grid import Grid

GRIDS = [
    pytest.param(Grid(16, 16), id="Mamba2"),
    pytest.param(Grid(16, 64), id="states at chunk ends"),
    pytest.param(Grid(16, 16, 16, 16), id="a unit is dropped"),
    pytest.param(Grid(16, 64, 16, 16), id="at chunk ends, and a unit is dropped"),
    pytest.param(Grid(16, 16, 0, 1), id="hashes cover the next token"),
    pytest.param(Grid(16, 64, 0, 1), id="at chunk ends, and hashes cover the next token"),
]

LENGTHS = range(400)


def deepest(grid: Grid, condition) -> int:
    """The last position for a state at which `condition` holds; 0 if there is none."""
    return max((state for state in range(grid.alignment, LENGTHS.stop, grid.alignment) if condition(state)), default=0)


def matched(grid: Grid, tokens: int) -> int:
    """Tokens up to which vLLM's hashes of two prompts match that share so many: each covers what lies ahead of it."""
    covered = grid.ahead - grid.drop
    return max(tokens - covered, 0) // grid.unit * grid.unit


@pytest.mark.parametrize("grid", GRIDS)
def test_a_state_is_usable_by_who_shares_it_and_what_lies_ahead(grid):
    for boundary in LENGTHS:
        assert grid.usable(boundary) == deepest(grid, lambda state, most=boundary: state + grid.ahead <= most)
        assert grid.floor(boundary) == deepest(grid, lambda state, most=boundary: state <= most)


@pytest.mark.parametrize("grid", GRIDS)
def test_what_is_delivered_by_hashes_is_what_is_usable_by_tokens(grid):
    """Of a longer prompt, if a hash at least was found; and the same prompt again computes its last token."""
    for tokens in LENGTHS:
        assert grid.deliverable(matched(grid, tokens), 2 * tokens + 2) == grid.usable(tokens)
        again = deepest(grid, lambda state, most=tokens: state + max(grid.ahead, 1) <= most)
        assert grid.deliverable(matched(grid, tokens), tokens) == again == grid.floor(grid.resumable(tokens))


@pytest.mark.parametrize("grid", GRIDS)
def test_hashes_that_match_stand_for_as_many_shared_tokens_as_they_cover(grid):
    assert grid.shared(0) == 0
    for whole in range(grid.unit, LENGTHS.stop, grid.unit):
        assert matched(grid, grid.shared(whole)) == whole > matched(grid, grid.shared(whole) - 1)


def test_the_table_of_the_readme():
    """Of a boundary at 163 tokens, states on multiples of 16 and of 64."""
    for drop, ahead, positions in ((0, 0, (160, 128)), (16, 16, (144, 128)), (0, 1, (160, 128))):
        assert tuple(Grid(16, alignment, drop, ahead).usable(163) for alignment in (16, 64)) == positions


def test_only_groups_with_a_draft_heads_rows_lose_a_unit():
    grid = Grid(16, 16, 16, 16)
    found = [grid.drop_in(SimpleNamespace(**manager)) for manager in ({}, {"use_eagle": True}, {"use_eagle": False})]
    assert found == [16, 16, 0]


def test_a_prefix_is_named_by_its_last_whole_unit():
    request = SimpleNamespace(block_hashes=[b"16", b"32", b"48"])
    assert [Grid(16, 16).hash_of(request, tokens) for tokens in (16, 31, 32, 47, 48)] == [
        b"16",
        b"16",
        b"32",
        b"32",
        b"48",
    ]
