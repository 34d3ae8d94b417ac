"""`seamark bench mine` on real engines: Seamark behind its gateway beside a vLLM without a cache, asked in turns."""

from __future__ import annotations

import json
from itertools import pairwise

from proxy.bench import mine
from proxy.bench.harness.servers import MODEL_NAME
from tests.harness.engines import SharedServers

FEW = ("--lengths", "200", "--pairs", "1")


def test_a_stack_with_seamark_beside_one_without(servers: SharedServers, capsys):
    arguments = ["--base-url", servers.gateway.url, "--against", servers.reference.url, "--json", *FEW]
    assert mine.main(arguments) == 0
    report = json.loads(capsys.readouterr().out)
    ours, theirs = report["stacks"]
    assert ours["model"] == theirs["model"] == MODEL_NAME
    assert ours["lengths"]["200"]["hit"] >= mine.HITS and not theirs["lengths"]["200"]["hit"]
    assert "of it in this stack's cache and 0% in the other's" in report["verdict"]
    (pair,) = ours["lengths"]["200"]["pairs"]
    assert pair["cold"]["prompt_tokens"] > ours["lengths"]["200"]["shared"] > 150
    assert all(told["drafts"] == {"steps": 0, "tokens": 0, "accepted_per_step": 0.0} for told in (ours, theirs))
    assert pair["warm"]["tokens_per_second"] > 0 and ours["lengths"]["200"]["tokens_per_second"]["warm"] > 0
    # Each turn finds the one before it.
    turns = ours["conversation"]
    assert all(later["cached_tokens"] > earlier["cached_tokens"] for earlier, later in pairwise(turns))
