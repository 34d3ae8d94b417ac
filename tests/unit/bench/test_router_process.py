"""What stands for prompts whose texts a trace does not have, and where a user's router is looked for."""

from __future__ import annotations

import sys
from itertools import takewhile
from pathlib import Path

from tests.bench.traces.formats import BLOCK, read
from tests.bench.traces.router_process import TOKENS_PER_LETTER, Played, installed, text_of

CONVERSATION = Path(__file__).parents[2] / "data" / "traces" / "mooncake_conversation.jsonl.gz"


def common(one, other) -> int:
    """Length of the common beginning."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


def test_texts_share_as_much_as_prompts_share_blocks():
    requests = read(CONVERSATION).requests[:60]
    texts = [text_of(request) for request in requests]
    shared = 0
    for one, text in zip(requests, texts, strict=True):
        assert abs(len(text) * TOKENS_PER_LETTER - one.prompt) < BLOCK
        for other, beside in zip(requests, texts, strict=True):
            if one is other:
                continue
            blocks = common(one.blocks, other.blocks)
            letters = common(text, beside)
            assert 0 <= letters - blocks * BLOCK // TOKENS_PER_LETTER < 8
            shared += blocks > 1
    assert shared


def test_an_installed_router_is_found_as_a_module_or_on_the_path(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert installed() is None
    script = tmp_path / "smg"
    script.write_text("#!/bin/sh\n")
    script.chmod(0o755)
    assert installed() == [str(script), "launch"]
    (tmp_path / "package" / "smg").mkdir(parents=True)
    (tmp_path / "package" / "smg" / "__init__.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path / "package"))
    assert installed() == [sys.executable, "-m", "smg", "launch"]


def test_what_makes_a_row_doubtful_is_told():
    assert Played().remarks == []
    assert Played(failed=2, failure="503").remarks == ["smg failed 2 requests: 503"]
    assert "0.30 simulated seconds late" in Played(late=0.3).remarks[0]
