"""What a query measures follows from the names of its metrics and what is done to them."""

from __future__ import annotations

import promql_parser
import pytest

from tests.bench.dashboards import Incommensurable, dimension

SECONDS, PER_SECOND = {"s": 1}, {"n": 1, "s": -1}


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        ("increase(seamark_seconds_saved_total[1h])", SECONDS),
        ("sum by (model) (rate(seamark_seconds_saved_total[1m]))", {}),
        ("rate(seamark_miss_total[1m])", PER_SECOND),
        ("rate(seamark_cached_tokens_total[1m])", {"tok": 1, "s": -1}),
        ("sum(rate(a_tokens_total[1m])) / (sum(rate(b_tokens_total[1m])) > 0)", {}),
        ("histogram_quantile(0.9, sum by (le) (rate(a_seconds_bucket[1m])))", SECONDS),
        ("rate(a_seconds_count[1m])", PER_SECOND),
        ("rate(a_seconds_sum[1m]) / rate(a_seconds_count[1m])", {"s": 1, "n": -1}),
        ("rate(vllm:iteration_tokens_total_count[1m])", PER_SECOND),
        ("max(vllm:kv_cache_usage_perc) * 2", {}),
        ("sum(seamark_checkpoint_bytes)", {"B": 1}),
        ("a_seconds > 1 and b_bytes", SECONDS),
    ],
)
def test_a_query_has_the_dimension_of_what_it_reads(query, expected):
    assert dimension(promql_parser.parse(query)) == expected


@pytest.mark.parametrize("query", ["a_seconds + b_bytes", "a_tokens > b_seconds"])
def test_what_cannot_be_added_or_compared_is_refused(query):
    with pytest.raises(Incommensurable):
        dimension(promql_parser.parse(query))
