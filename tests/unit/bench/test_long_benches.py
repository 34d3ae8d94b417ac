"""`tests.bench`: the conversations of `long_turns` and `memory`, and what these make of runs."""

from __future__ import annotations

import itertools
import json

import pytest

from proxy.boundaries.layout import OPEN_ROLES
from proxy.chat.reader import chat_request
from proxy.observability.explanations import MAX_REQUESTS
from tests.bench.long_chats import conversation
from tests.bench.long_turns import DIRECT, PLAIN, SEAMARK, Batch, Contestant, render, row_of
from tests.bench.memory import MIB, Look, Report
from tests.harness.mock_worker import CHARACTERS_PER_TOKEN

SIZES = range(50_000, 60_001, 2_000)


def test_a_conversation_grows_as_wanted_and_each_request_repeats_the_one_before():
    raws = list(conversation(1, SIZES))
    assert [len(raw) // CHARACTERS_PER_TOKEN for raw in raws] == pytest.approx(list(SIZES), rel=0.05)
    bodies = [json.loads(raw) for raw in raws]
    for earlier, later in itertools.pairwise(bodies):
        shared = len(earlier["messages"])
        assert later["messages"][:shared] == earlier["messages"] and len(later["messages"]) > shared
        assert later["tools"] == earlier["tools"]
    assert all(chat_request(body).roles[-1] in OPEN_ROLES for body in bodies)


def test_conversations_share_tools_and_system_prompt_and_no_message_behind_them():
    one, other = (json.loads(next(conversation(number, SIZES))) for number in (1, 2))
    assert (one["tools"], one["messages"][0]) == (other["tools"], other["messages"][0])
    assert not [message for message in one["messages"][1:] if message in other["messages"]]


def test_a_streamed_conversation_asks_for_streams_and_is_the_same():
    plain, streamed = (json.loads(next(conversation(1, SIZES, kind))) for kind in (False, True))
    assert streamed["stream"] is True and streamed["messages"] == plain["messages"] and "stream" not in plain


def test_a_rate_is_the_inverse_of_the_median_cpu_time():
    direct, ours = Contestant(DIRECT, None, None), Contestant(SEAMARK, None, object())
    for factor in (1, 2, 3):
        direct.batches[PLAIN].append(Batch(None, 0.002))
        ours.batches[PLAIN].append(Batch(0.002 * factor, 0.002 + 0.001 * factor))
    row = row_of(ours, direct, PLAIN)
    assert row.rate == pytest.approx(250) and row.p50 == pytest.approx(0.002)
    lines = render([row_of(direct, direct, PLAIN), row], {"smg": "no such version"}).splitlines()
    assert lines[1].split() == [DIRECT, "(2.0)"]
    assert lines[2].split() == [SEAMARK, "4.00", "3.00..5.00", "250.0", "+2.0"]
    assert lines[3].strip() == "smg is missing: no such version"


def looked(resident=100, prefixes=0, **tables):
    return Look(resident * MIB, {"prefix index": prefixes * MIB}, tables)


def test_a_table_without_a_bound_that_keeps_growing_is_told():
    grown = Report(10, 2, 1, (looked(), looked(held=10), looked(held=20))).growing
    assert grown == ["held: 10 entries, then 20"]
    assert not Report(10, 2, 1, (looked(), looked(held=10), looked(held=13))).growing


def test_a_table_may_grow_to_its_bound_and_no_further():
    tables = [{"Explanations._records": entries} for entries in (MAX_REQUESTS // 2, MAX_REQUESTS, MAX_REQUESTS + 1)]
    looks = [looked(**entries) for entries in tables]
    assert not Report(10, 2, 1, tuple(looks[:2])).growing
    assert Report(10, 2, 1, tuple(looks[1:])).growing


def test_memory_that_no_part_accounts_for_is_told():
    assert not Report(10, 2, 1, (looked(), looked(100), looked(120, prefixes=18))).growing
    grown = Report(10, 2, 1, (looked(), looked(100), looked(120, prefixes=10))).growing
    assert grown == ["resident: 10 MiB more than its parts"]
