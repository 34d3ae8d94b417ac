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


def test_what_a_gateway_expects_holds_until_the_engine_has_looked_into_its_cache():
    waiting = request("ab,1000,400")
    assert load.of_gateways([waiting]) == {"ab": (1, 400)}
    waiting.num_computed_tokens = 16
    assert load.of_gateways([waiting]) == {"ab": (1, 984)}
    # No more than the prompt has, whatever was said.
    assert load.of_gateways([request("ab,9,99999")]) == {"ab": (1, 1000)}


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
