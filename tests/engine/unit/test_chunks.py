"""Where a prefill chunk ends, and which states of a request are wanted."""

from types import SimpleNamespace

from engine_patches.scheduler.checkpoints import RequestHint
from engine_patches.scheduler.chunks import next_stop, run_to_the_budget
from engine_patches.scheduler.hints import EDGE, HINTED, JUNCTION, TAIL, wanted_positions


def request(prompt, junction=0, tokens=None):
    return SimpleNamespace(num_prompt_tokens=prompt, num_tokens=tokens or prompt, shared_prefix_boundary=junction)


def test_a_chunk_that_reaches_the_prompts_end_is_left_alone():
    assert run_to_the_budget(request(250), 0, 250, 16) == 250
    assert run_to_the_budget(request(250), 48, 202, 16) == 202


def test_a_chunk_in_between_ends_where_a_state_could_be_placed():
    assert run_to_the_budget(request(1000), 0, 100, 16) == 96
    assert run_to_the_budget(request(1000), 96, 100, 64) == 96


def test_a_budget_below_the_unit_still_makes_progress():
    assert run_to_the_budget(request(1000), 0, 10, 16) == 10
    assert run_to_the_budget(request(1000), 10, 10, 16) == 6


def test_a_resumed_request_is_split_over_its_own_output_too():
    assert run_to_the_budget(request(100, tokens=400), 0, 200, 16) == 192


def test_a_cut_is_made_at_the_next_position_that_is_worth_a_pass():
    hint = RequestHint((160, 464))
    stops = [next_stop(hint, start, 384, worth_a_pass=100) for start in (0, 159, 160, 463, 464, 900)]
    assert stops == [160, 160, 464, 464, 0, 0]
    assert next_stop(hint, 0, 384, worth_a_pass=200) == 464


def test_vllms_own_junction_stays_a_stop_floored_to_its_block():
    hint = RequestHint((464,), upstream_junction=400)
    assert next_stop(hint, 0, 384, 0) == 384
    assert next_stop(hint, 384, 384, 0) == 464


def test_without_a_hint_what_vllm_keeps_is_kept():
    assert wanted_positions(request(1000), (), 16, 384) == [(768, EDGE), (992, TAIL)]
    assert wanted_positions(request(1000, junction=500), (), 16, 384) == [(496, JUNCTION), (768, EDGE), (992, TAIL)]
    assert wanted_positions(request(300), (), 16, 384) == []
    assert wanted_positions(request(300, junction=100), (), 16, 384) == [(96, JUNCTION)]
    assert wanted_positions(request(16), (), 16, 384) == []


def test_a_turn_boundary_makes_the_tail_redundant():
    assert wanted_positions(request(1000), (160, 976), 16, 384) == [(160, HINTED), (976, HINTED)]
    assert wanted_positions(request(1000), (160,), 16, 384) == [(160, HINTED), (992, TAIL)]


def test_a_position_at_the_very_end_does_not_serve_the_same_prompt_again():
    assert wanted_positions(request(160), (160,), 16, 384) == [(144, TAIL), (160, HINTED)]
