"""What stands for prompts whose texts a trace does not have."""

from __future__ import annotations

from itertools import takewhile
from pathlib import Path

import pytest

from tests.bench.traces.formats import BLOCK, read
from tests.bench.traces.router_process import TOKENS_PER_ID, TOKENS_PER_LETTER, Played, ids_of, text_of

CONVERSATION = Path(__file__).parents[2] / "data" / "traces" / "mooncake_conversation.jsonl.gz"


def common(one, other) -> int:
    """Length of the common beginning."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


@pytest.mark.parametrize(("of", "tokens"), [(text_of, TOKENS_PER_LETTER), (ids_of, TOKENS_PER_ID)])
def test_what_stands_for_prompts_shares_as_much_as_these_share_blocks(of, tokens):
    requests = read(CONVERSATION).requests[:60]
    texts = [of(request) for request in requests]
    shared = 0
    for one, text in zip(requests, texts, strict=True):
        assert abs(len(text) * tokens - one.prompt) < BLOCK
        for other, beside in zip(requests, texts, strict=True):
            if one is other:
                continue
            blocks = common(one.blocks, other.blocks)
            letters = common(text, beside)
            assert 0 <= letters - blocks * BLOCK // tokens < 8
            shared += blocks > 1
    assert shared


def test_what_makes_a_row_doubtful_is_told():
    assert Played().remarks("smg") == []
    assert Played(failed=2, failure="503").remarks("smg") == ["smg failed 2 requests: 503"]
    assert "0.30 simulated seconds late" in Played(late=0.3).remarks("smg")[0]
