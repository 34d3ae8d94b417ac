"""The worker that holds the prefix, unless it is much busier."""

from __future__ import annotations

import pytest

from proxy.chat.usage import Usage, usage_of
from proxy.fleet.pool import union_of_models
from proxy.fleet.probe import Probed
from proxy.fleet.worker import Load, Worker
from proxy.fleet.worker_metrics import EngineInfo
from proxy.pipeline.sse import usage_in_stream
from proxy.routing.policy import (
    LEAD_PRICE,
    LEAD_TOKENS,
    MOST_LENGTHS,
    RECOMPUTE_PRICE,
    REQUEST_TOKENS,
    SHARED_PRICE,
    UNSEEN_TOKENS,
    choose,
)
from proxy.routing.prefix_index import Holding
from tests.harness.probed import probed


def worker(name: str, inflight: int = 0) -> Worker:
    engine = EngineInfo("0.1.0", "0.32.0", match_unit=16, block_size=384)
    return Worker(f"http://{name}", renderer=None, probed=probed(name, engine), inflight=inflight)


def test_the_holder_of_the_longest_prefix_is_chosen():
    workers = [worker("a"), worker("b", inflight=3), worker("c")]
    held = {"b": Holding(400, b"deep", is_told=True), "c": Holding(100, b"short", is_told=True)}
    assert choose(workers, held, load_slack=8).boot == "b"


def test_without_a_holder_the_least_loaded_is_chosen():
    assert choose([worker("a", 2), worker("b", 1)], {}, load_slack=8).boot == "b"


def test_requests_with_one_cache_key_go_to_one_worker_where_nothing_else_speaks():
    workers = [worker(name) for name in "abcd"]
    chosen = {choose(workers, {}, 8, together).boot for together in ("session \ud800", "session \ud800")}
    assert len(chosen) == 1
    assert len({choose(workers, {}, 8, f"{number}").boot for number in range(40)}) == 4
    assert choose(workers, {"b": Holding(400, b"deep", is_told=True)}, 8, "session").boot == "b"


def test_a_worker_that_goes_moves_no_conversation_of_the_others():
    workers = [worker(name) for name in "abcde"]
    keys = [f"session {number}" for number in range(50)]
    before = {key: choose(workers, {}, 8, key).boot for key in keys}
    after = {key: choose(workers[1:], {}, 8, key).boot for key in keys}
    assert "a" in before.values()
    assert all(after[key] == before[key] for key in keys if before[key] != "a")


def test_of_many_equal_holders_the_one_that_was_sent_the_fewest_is_chosen():
    workers = [worker(str(number)) for number in range(100)]
    for number, one in enumerate(workers):
        one.dispatched = abs(number - 70)
    held = {one.boot: Holding(4000, b"head", is_told=True) for one in workers}
    assert choose(workers, held, load_slack=8) is workers[70]


def test_a_holding_shorter_than_the_match_unit_does_not_count():
    workers = [worker("a", inflight=1), worker("b")]
    assert choose(workers, {"a": Holding(15, b"head", is_told=True)}, load_slack=8).boot == "b"


def test_a_guess_of_what_is_held_counts_for_the_choice():
    workers = [worker("a"), worker("b", inflight=3)]
    assert choose(workers, {"b": Holding(400, b"deep", is_told=False)}, load_slack=8).boot == "b"


def test_a_worker_whose_answers_differed_holds_nothing_that_counts():
    workers = [worker("a", inflight=1), worker("b")]
    workers[0].cache.quarantine()
    assert choose(workers, {"a": Holding(400, b"deep", is_told=True)}, load_slack=8).boot == "b"


def test_new_prefixes_spread_over_idle_workers():
    used = worker("a")
    used.dispatched = 5
    assert choose([used, worker("b")], {}, load_slack=8).boot == "b"


def test_a_holder_that_is_too_busy_is_passed_over():
    workers = [worker("a"), worker("b", inflight=21)]
    assert choose(workers, {"b": Holding(400, b"deep", is_told=True)}, load_slack=8).boot == "a"


@pytest.mark.parametrize(
    ("tokens", "wait"),
    [
        (160, LEAD_PRICE * 160),  # little to lose, little to wait for
        (3072, LEAD_TOKENS),
        (8192, LEAD_TOKENS),  # a lead that is soon gone
        (16_384, RECOMPUTE_PRICE * 16_384),
        (100_000, RECOMPUTE_PRICE * 100_000),  # what computing it elsewhere costs the fleet
    ],
)
def test_a_request_waits_for_its_holder_up_to_what_the_prefix_is_worth(tokens, wait):
    workers = [worker("a"), worker("b")]
    held = {"b": Holding(tokens, b"deep", is_told=True)}
    workers[1].prefill_tokens = wait
    assert choose(workers, held, load_slack=0).boot == "b"
    workers[1].prefill_tokens += 1
    assert choose(workers, held, load_slack=0).boot == "a"


@pytest.mark.parametrize(
    ("shared", "wait"),
    [
        (60_000, SHARED_PRICE * 60_000),  # a head of many, which is soon as useful elsewhere
        (99_999, SHARED_PRICE * 60_000),
        (0, RECOMPUTE_PRICE * 60_000),
        (40_000, SHARED_PRICE * 40_000 + RECOMPUTE_PRICE * 20_000),
    ],
)
def test_what_several_conversations_share_is_worth_less_of_a_wait(shared, wait):
    workers = [worker("a"), worker("b")]
    held = {"b": Holding(60_000, b"deep", is_told=True)}
    workers[1].prefill_tokens = wait
    assert choose(workers, held, load_slack=0, shared=shared).boot == "b"
    workers[1].prefill_tokens += 1
    assert choose(workers, held, load_slack=0, shared=shared).boot == "a"


def test_a_short_lead_is_borne_for_a_shared_beginning_too():
    workers = [worker("a"), worker("b")]
    held = {"b": Holding(8192, b"head", is_told=True)}
    workers[1].prefill_tokens = LEAD_TOKENS
    assert choose(workers, held, load_slack=0, shared=8192).boot == "b"
    workers[1].prefill_tokens += 1
    assert choose(workers, held, load_slack=0, shared=8192).boot == "a"


@pytest.mark.parametrize("shared", [0, 40_000])
def test_a_request_waits_for_what_the_next_worker_does_not_hold_either(shared):
    workers = [worker("a"), worker("b"), worker("c")]
    held = {"b": Holding(60_000, b"deep", is_told=True), "c": Holding(40_000, b"head", is_told=True)}
    workers[0].prefill_tokens = 10**9
    workers[1].prefill_tokens = RECOMPUTE_PRICE * 20_000
    assert choose(workers, held, load_slack=0, shared=shared).boot == "b"
    workers[1].prefill_tokens += 1
    assert choose(workers, held, load_slack=0, shared=shared).boot == "c"


def test_of_many_lengths_only_the_longest_are_weighed():
    workers = [worker(str(number)) for number in range(MOST_LENGTHS + 2)]
    held = {one.boot: Holding(16 * number, b"", is_told=True) for number, one in enumerate(workers)}
    for one in workers[1:]:
        one.prefill_tokens = 10**9 - 10**6 * int(one.boot)
    workers[1].prefill_tokens = 1  # near enough, but nobody looks there
    assert choose(workers, held, load_slack=0).boot == "0"
    held.pop("9")
    assert choose(workers, held, load_slack=0).boot == "1"


def test_of_several_holders_that_are_too_busy_the_next_one_is_chosen():
    workers = [worker("a"), worker("b", inflight=129), worker("c")]
    held = {"b": Holding(4000, b"deep", is_told=True), "c": Holding(400, b"short", is_told=True)}
    assert choose(workers, held, load_slack=0).boot == "c"


def test_of_equal_holders_the_less_loaded_one_is_chosen():
    workers = [worker("a", inflight=2), worker("b", inflight=1), worker("c")]
    held = {name: Holding(400, b"deep", is_told=True) for name in "ab"}
    assert choose(workers, held, load_slack=8).boot == "b"


def test_what_other_gateways_have_at_a_worker_is_work_like_ones_own():
    workers = [worker("a"), worker("b", inflight=1)]
    workers[0].others = Load(requests=2, prefill_tokens=UNSEEN_TOKENS)
    assert choose(workers, {}, load_slack=8).boot == "b"
    workers[0].others = Load(prefill_tokens=LEAD_PRICE * 1600 + 9 * REQUEST_TOKENS + 1)
    held = {"a": Holding(1600, b"deep", is_told=True)}
    assert choose(workers, held, load_slack=8).boot == "b"
    workers[0].others = Load(prefill_tokens=LEAD_PRICE * 1600)
    assert choose(workers, held, load_slack=8).boot == "a"


@pytest.mark.parametrize("held", [{}, {name: Holding(400, b"head", is_told=True) for name in "abc"}])
def test_workers_that_are_nearly_idle_are_taken_in_turn_where_other_gateways_send_too(held):
    workers = [worker("a"), worker("b"), worker("c")]
    workers[0].dispatched = 1
    workers[1].prefill_tokens, workers[2].prefill_tokens = UNSEEN_TOKENS, UNSEEN_TOKENS + REQUEST_TOKENS + 1
    assert choose(workers, held, load_slack=99).boot == "a"
    workers[0].others = Load(requests=1)  # what these gateways have sent since is not known
    assert choose(workers, held, load_slack=99).boot == "b"


def test_usage_is_read_from_the_end_of_a_stream():
    tail = (
        b'alf an event"}}]}\n\n'
        b'data: {"choices":[],"usage":{"prompt_tokens":5,"prompt_tokens_details":{"cached_tokens":0}}}\n\n'
        b"data: [DONE]\n\n"
    )
    assert usage_in_stream(tail) == Usage(5, 0)
    assert usage_in_stream(b'data: {"choices":[{"delta":{"content":"\\"usage\\""}}]}\n\ndata: [DONE]\n\n') is None
    assert usage_in_stream(b"") is None


@pytest.mark.parametrize(
    ("usage", "read"),
    [
        ({"prompt_tokens": 9, "prompt_tokens_details": None}, Usage(9, None)),
        ({"input_tokens": 9, "input_tokens_details": {"cached_tokens": 4}}, Usage(9, 4)),
        ({"input_tokens": 5, "cache_read_input_tokens": 4, "cache_creation_input_tokens": 0}, Usage(9, 4)),
        ({"input_tokens": 5}, Usage(5, None)),
        ({"prompt_tokens": "9"}, None),
        (None, None),
    ],
)
def test_every_apis_spelling_of_usage_is_read(usage, read):
    assert usage_of({"usage": usage}) == read


def test_models_of_several_workers_are_listed_once():
    one, two = worker("a"), worker("b")
    one.probed = Probed(models=[{"id": "m", "max_model_len": 8192}])
    two.probed = Probed(models=[{"id": "m", "max_model_len": 4096}, {"id": "n"}])
    assert union_of_models([one, two]) == [{"id": "m", "max_model_len": 8192}, {"id": "n"}]
