"""The gateway's metrics: what dashboards read before anything has happened, and what of a worker that is gone."""

from __future__ import annotations

from itertools import pairwise

import pytest

from proxy.metrics import OVERHEAD_SECONDS, SECONDS


@pytest.mark.parametrize("buckets", [SECONDS, OVERHEAD_SECONDS])
def test_buckets_ascend_and_none_is_more_than_five_times_the_one_before(buckets):
    steps = [later / earlier for earlier, later in pairwise(buckets)]
    assert min(steps) > 1.2 and max(steps) <= 5
