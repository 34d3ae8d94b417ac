"""The chats of `python -m tests.bench.eviction`, and what it says of what was found."""

from __future__ import annotations

from dataclasses import replace

import pytest

from proxy.boundaries.resolve import resolve
from tests.bench.eviction import LEAST, WAYS, line, missed, pools
from tests.harness.multi_turn import ASKS, BLOCK, CLOSER, GROUPS, OPENER, OURS, USED, Chat, Found, Pattern, hint, turns

PATTERN = Pattern(clients=6, rounds=4, question=20, answer=8)


def test_each_client_takes_its_turns_in_order_and_the_order_is_the_seeds():
    found = list(turns(PATTERN))
    assert len(found) == 24 and [turn.at for turn in found] == sorted(turn.at for turn in found)
    for client in range(6):
        assert [turn.number for turn in found if turn.client == client] == [0, 1, 2, 3]
    assert found == list(turns(PATTERN)) != list(turns(replace(PATTERN, seed=2)))


def test_rounds_are_begun_together_or_not():
    assert [turn.number for turn in turns(PATTERN)] == [number for number in range(4) for _ in range(6)]
    free = [turn.number for turn in turns(replace(PATTERN, rate=2.0, together=False))]
    assert free != sorted(free)


def test_a_prompt_goes_on_from_the_last_one_and_its_answer():
    chat = Chat(PATTERN, 0)
    first = chat.ask()
    chat.answered([7] * 8)
    second = chat.ask()
    assert chat.shared == len(first) and second[: len(first) + 8] == [*first, *[7] * 8]
    assert first != Chat(PATTERN, 1).ask() and first == Chat(PATTERN, 0).ask()
    assert len(second) + PATTERN.answer + len(CLOSER) <= PATTERN.longest


def test_the_hint_names_the_last_openers_and_the_end_of_the_turn():
    chat = Chat(PATTERN, 0)
    for number in range(4):
        prompt = chat.ask()
        *openers, end = resolve(hint(number), prompt)
        assert end == len(prompt) - len(ASKS)
        assert all(tuple(prompt[position - len(OPENER) : position]) == OPENER for position in openers)
        assert openers[0] == end - len(CLOSER) - PATTERN.question and len(openers) == min(max(number, 1), 3)
        chat.answered([7] * 8)


def test_a_pool_has_room_for_its_states_and_one_for_all_also_for_attention():
    apart, shared = pools(Pattern()).values()
    assert apart.blocks == 512 * GROUPS
    assert (shared.blocks - apart.blocks) * BLOCK >= 128 * Pattern().longest


def found(rate: float) -> Found:
    return Found(prompts=1000, shareable=900, hit=int(1000 * rate), later=10, whole=9)


def test_a_line_has_medians_and_each_seed():
    words = line(OURS, [found(0.7), found(0.9), found(0.81)]).split()
    assert words == [OURS, "0.810", "0.900", "0.900", "0.700", "0.900", "0.810"]


@pytest.mark.parametrize(
    ("ours", "used", "lacks"),
    [(0.85, 0.82, []), (0.82, 0.824, []), (0.81, 0.82, ["state used (0.820)"]), (0.79, 0.75, [f"{LEAST:.2f}"])],
)
def test_it_says_what_seamark_falls_short_of(ours, used, lacks):
    rates = dict.fromkeys(WAYS, 0.5) | {OURS: ours, USED: used}
    assert missed({way: [found(rate)] * 3 for way, rate in rates.items()}) == lacks
