"""What each gateway has an engine do, by the requests that are under way."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from engine_patches.scheduler import load


def request(told=None, prompt=1000, computed=0, params=True) -> SimpleNamespace:
    extra = None if told is None else {load.FIELD: told}
    return SimpleNamespace(
        sampling_params=SimpleNamespace(extra_args=extra) if params else None,
        num_prompt_tokens=prompt,
        num_computed_tokens=computed,
    )


def test_each_gateway_has_its_requests_and_what_is_left_of_their_prompts():
    requests = [
        request("ab,1000,400"),
        request("ab,1000,400", computed=700),
        request("cd,1000,1000", computed=1000),
        request(),
    ]
    assert load.of_gateways(requests) == {"ab": (2, 700), "cd": (1, 0), load.NO_GATEWAY: (1, 1000)}
    assert load.of_gateways([]) == {}


def test_what_a_gateway_expects_holds_until_the_engine_has_looked_into_its_cache():
    waiting = request("ab,1000,400")
    assert load.of_gateways([waiting]) == {"ab": (1, 400)}
    waiting.num_computed_tokens = 16
    assert load.of_gateways([waiting]) == {"ab": (1, 984)}
    # No more than the prompt has, whatever was said.
    assert load.of_gateways([request("ab,9,99999")]) == {"ab": (1, 1000)}


def test_a_request_that_generates_has_nothing_left():
    assert load.of_gateways([request("ab,1000,400", computed=1007)]) == {"ab": (1, 0)}


@pytest.mark.parametrize(
    "told",
    ["", "a", "a,1", "a,1,-1", "a,1,1,1", "x y,1,1", "a" * 33 + ",1,1", "a,1,999999999", 7, ["a", 1, 1], "A,1,1"],
)
def test_what_is_no_load_counts_as_come_past_the_gateways(told):
    assert load.of_gateways([request(told)]) == {load.NO_GATEWAY: (1, 1000)}


def test_a_request_that_samples_nothing_counts_too():
    assert load.of_gateways([request(params=False)]) == {load.NO_GATEWAY: (1, 1000)}


def step(new=(), tokens=None, drafts=None) -> SimpleNamespace:
    tokens = tokens or {"a": 1}
    return SimpleNamespace(
        scheduled_new_reqs=list(new),
        scheduled_spec_decode_tokens=drafts or {},
        total_num_scheduled_tokens=sum(tokens.values()),
        num_scheduled_tokens=tokens,
    )


@pytest.mark.parametrize(
    ("planned", "may"),
    [
        (None, True),
        (step(), False),
        (step(tokens={"a": 3}, drafts={"a": [5, 6]}), False),
        (step(tokens={"a": 64}), True),
        (step(new=["a"]), True),
    ],
)
def test_loads_are_added_up_where_a_step_may_have_changed_them(planned, may):
    assert load.may_have_changed(planned) is may
