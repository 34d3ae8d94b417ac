"""The worker that holds the prefix, unless it is much busier; and the word for what was missed."""

from __future__ import annotations

import pytest

from proxy.boundaries.boundary import Boundary
from proxy.chat.usage import Usage, usage_of
from proxy.fleet.pool import union_of_models
from proxy.fleet.worker import Worker
from proxy.fleet.worker_metrics import EngineInfo
from proxy.observability.reasons import Expectation, cache_label, reason_for
from proxy.pipeline.sse import usage_in_stream
from proxy.routing.policy import choose
from proxy.routing.prefix_index import ENTRY_BYTES, HOLDER_BYTES, Holding, PrefixIndex


def worker(name: str, inflight: int = 0) -> Worker:
    engine = EngineInfo("0.1.0", "0.32.0", match_unit=16, block_size=384)
    return Worker(f"http://{name}", renderer=None, boot=name, engine=engine, inflight=inflight)


def test_the_holder_of_the_longest_prefix_is_chosen():
    workers = [worker("a"), worker("b", inflight=3), worker("c")]
    held = {"b": Holding(400, b"deep"), "c": Holding(100, b"short")}
    assert choose(workers, held, load_slack=8).boot == "b"


def test_without_a_holder_the_least_loaded_is_chosen():
    assert choose([worker("a", 2), worker("b", 1)], {}, load_slack=8).boot == "b"


def test_requests_with_one_cache_key_go_to_one_worker_where_nothing_else_speaks():
    workers = [worker(name) for name in "abcd"]
    chosen = {choose(workers, {}, 8, together).boot for together in ("session \ud800", "session \ud800")}
    assert len(chosen) == 1
    assert len({choose(workers, {}, 8, f"{number}").boot for number in range(40)}) == 4
    assert choose(workers, {"b": Holding(400, b"deep")}, 8, "session").boot == "b"


def test_a_holding_shorter_than_the_match_unit_does_not_count():
    workers = [worker("a", inflight=1), worker("b")]
    assert choose(workers, {"a": Holding(15, b"head")}, load_slack=8).boot == "b"


def test_a_worker_whose_answers_differed_holds_nothing_that_counts():
    workers = [worker("a", inflight=1), worker("b")]
    workers[0].cache.quarantine()
    assert choose(workers, {"a": Holding(400, b"deep")}, load_slack=8).boot == "b"


def test_new_prefixes_spread_over_idle_workers():
    used = worker("a")
    used.dispatched = 5
    assert choose([used, worker("b")], {}, load_slack=8).boot == "b"


def test_a_holder_that_is_too_busy_is_passed_over():
    workers = [worker("a"), worker("b", inflight=9)]
    assert choose(workers, {"b": Holding(400, b"deep")}, load_slack=8).boot == "a"


def test_the_prefix_index_knows_the_deepest_prefix_of_each_worker():
    prefix_index = PrefixIndex(100 * ENTRY_BYTES)
    prefix_index.record([Boundary(100, "system", b"s"), Boundary(400, "turn", b"t")], "a")
    prefix_index.record([Boundary(100, "system", b"s")], "b")
    assert prefix_index.longest((b"s", b"t", b"new"), ["a", "b", "c"]) == {"a": (400, b"t"), "b": (100, b"s")}


def test_a_restarted_worker_holds_nothing_but_is_remembered_to_have():
    prefix_index = PrefixIndex(100 * ENTRY_BYTES)
    prefix_index.record([Boundary(100, "system", b"s")], "a#boot1")
    assert prefix_index.longest((b"s",), ["a#boot2"]) == {}
    assert prefix_index.ever_sent((b"s",)) == 100


def test_what_an_engine_no_longer_holds_is_remembered_to_have_been_sent():
    prefix_index = PrefixIndex(100 * ENTRY_BYTES)
    prefix_index.record([Boundary(100, "system", b"s"), Boundary(400, "turn", b"t")], "a")
    prefix_index.record([Boundary(400, "turn", b"t")], "b")
    prefix_index.forget([b"t", b"never"], "a")
    assert prefix_index.longest((b"s", b"t"), ["a", "b"]) == {"a": (100, b"s"), "b": (400, b"t")}
    prefix_index.forget_all("a")
    assert prefix_index.longest((b"s", b"t"), ["a"]) == {}
    assert prefix_index.sent((b"s", b"t"), ["a"]) == prefix_index.ever_sent((b"s", b"t")) == 400
    assert prefix_index.sent((b"s",), ["b", "c"]) == 0


def test_what_an_engine_told_is_not_overwritten_by_the_next_request():
    prefix_index = PrefixIndex(100 * ENTRY_BYTES)
    prefix_index.record([Boundary(163, "system", b"s")], "a")
    prefix_index.set_held(b"s", "a", 160)
    prefix_index.set_held(b"s", "b", 160)  # was never sent it
    prefix_index.record([Boundary(163, "system", b"s")], "a")
    assert prefix_index.longest((b"s",), ["a", "b"]) == {"a": (160, b"s")}


def test_many_workers_of_one_prefix_count_towards_the_bound():
    prefix_index = PrefixIndex(10 * ENTRY_BYTES)
    for number in range(1000):
        prefix_index.record([Boundary(16, "system", b"%d" % (number % 10))], f"worker {number // 10}")
    assert prefix_index._bytes <= 10 * ENTRY_BYTES
    assert prefix_index._bytes == sum(
        ENTRY_BYTES + (len(holders) - 1) * HOLDER_BYTES for _, holders in prefix_index._prefixes.values()
    )


def test_the_directory_is_bounded():
    prefix_index = PrefixIndex(10 * ENTRY_BYTES)
    for number in range(100):
        prefix_index.record([Boundary(16, "system", bytes([number]))], "a")
    assert len(prefix_index) == 10
    assert prefix_index.longest((bytes([99]),), ["a"])


def expect(**changes) -> Expectation:
    known = {
        "failure": None,
        "shareable": 163,
        "shareable_ever": 163,
        "held": 163,
        "predicted": 163,
        "deepest": 200,
        "match_unit": 16,
    }
    return Expectation(**{**known, **changes})


@pytest.mark.parametrize(
    ("expected", "cached", "word"),
    [
        (expect(), 160, "hit"),
        (expect(), 176, "hit"),
        (expect(), 144, "evicted"),
        (expect(), 0, "evicted"),
        (expect(predicted=0), 0, "other_worker"),
        (expect(predicted=40), 32, "other_worker"),
        (expect(held=0, predicted=0), 0, "evicted"),
        (expect(held=40, predicted=40), 32, "evicted"),
        (expect(held=40, predicted=0), 0, "other_worker"),
        (expect(shareable=0, shareable_ever=0, held=0, predicted=0), 0, "cold"),
        (expect(shareable=0, held=0, predicted=0), 0, "worker_restarted"),
        (expect(shareable=15, held=15, predicted=15), 0, "below_unit"),
        (expect(deepest=12, shareable=12, held=12, predicted=12), 0, "below_unit"),
        (expect(failure="unpatched"), 384, "unpatched"),
        (expect(failure="render_failed"), 0, "render_failed"),
    ],
)
def test_the_reason_is_the_deepest_cause(expected, cached, word):
    assert reason_for(expected, cached) == word


@pytest.mark.parametrize(("cached", "label"), [(0, "miss"), (32, "partial"), (160, "hit")])
def test_the_cache_label_compares_with_what_could_be_shared(cached, label):
    assert cache_label(expect(), cached) == label


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
    one.models = [{"id": "m", "max_model_len": 8192}]
    two.models = [{"id": "m", "max_model_len": 4096}, {"id": "n"}]
    assert union_of_models([one, two]) == [{"id": "m", "max_model_len": 8192}, {"id": "n"}]
