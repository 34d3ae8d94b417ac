"""When hints are used beside drafts, and who may change that."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from engine_patches.scheduler.draft_gate import NONE, OFF, ON, ON_TRIAL, DraftGate
from engine_patches.scheduler.refusals import LONGEST, SPECULATIVE, Refusal

TRIAL = {"seamark_trial": 1}


def request(**arguments: Any) -> SimpleNamespace:
    return SimpleNamespace(sampling_params=SimpleNamespace(extra_args=arguments or None))


def config(drafts: int = 2) -> SimpleNamespace:
    return SimpleNamespace(speculative_config=object() if drafts else None, num_speculative_tokens=drafts)


@pytest.mark.parametrize(
    ("value", "drafts", "refusal", "state"),
    [
        ("auto", 2, None, ON_TRIAL),
        ("", 2, None, ON_TRIAL),
        ("1", 2, None, ON),
        ("0", 2, Refusal(SPECULATIVE, "it is off"), OFF),
        ("auto", 2, Refusal(SPECULATIVE, "a method"), OFF),
        ("auto", 0, None, NONE),
        ("auto", 0, Refusal("no_states", "caching is off"), NONE),
    ],
)
def test_an_engine_begins_as_its_drafts_and_the_setting_say(monkeypatch, value, drafts, refusal, state):
    monkeypatch.setenv("SEAMARK_DRAFTS", value)
    gate = DraftGate.of(config(drafts), refusal)
    assert gate.state == state and bool(gate.name) == (state == ON_TRIAL)
    assert gate.admits(request()) == (state in (NONE, ON))
    assert gate.admits(request(**TRIAL))


@pytest.fixture
def gate(monkeypatch) -> DraftGate:
    monkeypatch.delenv("SEAMARK_DRAFTS", raising=False)
    return DraftGate.of(config(), None)


@pytest.mark.parametrize(
    "command", ["open:{other}", "open:", "open", "", "opened:{name}", "trial:{name}", "on:{name}", 1, None, ["open"]]
)
def test_nothing_else_changes_it(gate, command):
    if isinstance(command, str):
        command = command.format(name=gate.name, other=DraftGate.of(config(), None).name)
    assert not gate.obey(request(**TRIAL, seamark_drafts=command))
    assert gate.state == ON_TRIAL


def test_a_reason_is_cut_to_what_a_label_holds(gate):
    gate.obey(request(**TRIAL, seamark_drafts=f"closed:{gate.name}:" + "x" * 1000))
    assert gate.refusal is not None and len(gate.refusal.cause) == LONGEST
