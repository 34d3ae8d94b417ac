"""The trace of traffic: what its lines share, what they do not tell, and what becomes of them without room."""

from __future__ import annotations

import asyncio
import json
import re
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.boundaries.divergence import common_prefix
from proxy.chat.reader import completions_request
from proxy.errors import SettingsError
from proxy.fleet.worker import prompt_of
from proxy.idle_work import IdleWork
from proxy.metrics import Metrics
from proxy.observability import traffic_trace
from proxy.observability.traffic_trace import BLOCK, TrafficTrace
from tests.harness.api_keys import bearer
from tests.harness.waiting import until

FIELDS = {"timestamp", "output_length", "input_length", "hash_ids"}


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@st.composite
def prompts(draw: st.DrawFn) -> list[tuple[list[int], str]]:
    """Token ids and the salt they come with: each goes on from a part of an earlier one."""
    found: list[tuple[list[int], str]] = [([], "a")]
    for own in draw(st.lists(st.lists(st.integers(0, 50_000), min_size=1, max_size=3 * BLOCK), min_size=2, max_size=8)):
        before, salt = draw(st.sampled_from(found))
        kept = draw(st.integers(0, len(before)))
        found.append(([*before[:kept], *own], draw(st.sampled_from((salt, "a", "b")))))
    return found[1:]


@given(prompts())
def test_two_prompts_have_the_same_names_exactly_as_far_as_their_blocks_are_equal(tmp_path_factory, drawn):
    path = tmp_path_factory.mktemp("trace") / "trace.jsonl"

    async def write() -> None:
        trace = TrafficTrace(path, 2**20, Metrics().traced, IdleWork())
        for ids, salt in drawn:
            chat = completions_request({"model": "m", "prompt": ids, "cache_salt": salt})
            assert chat is not None
            trace.add(chat, None, 1, 0.0, None, 1)  # type: ignore[arg-type]  # ids are not rendered
        await trace.aclose()

    asyncio.run(write())
    rows = lines(path)
    for (ids, salt), row in zip(drawn, rows, strict=True):
        assert row["input_length"] == len(ids) and len(row["hash_ids"]) == -(-len(ids) // BLOCK)
        blocks = [(salt, *ids[at : at + BLOCK]) for at in range(0, len(ids), BLOCK)]
        for (other, its), theirs in zip(drawn, rows, strict=True):
            shared = common_prefix(blocks, [(its, *other[at : at + BLOCK]) for at in range(0, len(other), BLOCK)])
            assert common_prefix(row["hash_ids"], theirs["hash_ids"]) == shared


async def test_what_came_is_told_without_a_word_of_it_and_sharing_by_key(in_memory, worker, keys, tmp_path):
    path = tmp_path / "trace.jsonl"
    own = await in_memory(worker, trace=path, api_keys=keys)
    words = "Harbour pilots describe tidetables " * 40
    for key, session, more in map(str.split, ("ann s1 noon", "ann s1 dusk", "bob s1 noon", "cleo s2 noon")):
        body = {"model": "m", "messages": [{"role": "system", "content": words}, {"role": "user", "content": more}]}
        assert (await own.post(body, **bearer(key), x_session_id=session)).status_code == 200
    await own.post({"model": "m", "messages": 7}, **bearer("ann"))  # no chat
    await until(lambda: path.exists() and len(lines(path)) == 4)
    first, second, bob, cleo = lines(path)
    assert first.keys() == FIELDS | {"session"} and own.metric("seamark_trace_requests_total", result="written") == 4
    told = set(re.findall("[A-Za-z]{4,}", path.read_text()))
    assert told == {"timestamp", "input", "output", "length", "hash", "session"}
    assert first["timestamp"] <= second["timestamp"] and first["session"] == second["session"] != bob["session"]
    assert 0 < common_prefix(first["hash_ids"], second["hash_ids"]) < len(first["hash_ids"])
    assert not common_prefix(first["hash_ids"], bob["hash_ids"]) and bob["hash_ids"] == cleo["hash_ids"]
    assert path.stat().st_mode & 0o077 == 0


async def test_a_file_has_whole_lines_up_to_its_bound_and_goes_on_after_a_restart(tmp_path, monkeypatch, caplog):
    path, metrics = tmp_path / "trace.jsonl", Metrics()

    async def written(*prompts: list[int], room: int = 2**20, worker: Any = None) -> None:
        trace = TrafficTrace(path, room, metrics.traced, IdleWork())
        for prompt in prompts:  # where there is none, no worker is there to render one
            trace.add(completions_request({"prompt": prompt or "Tide?"}), worker, 600, time.perf_counter(), "s", 0)
        await trace.aclose()

    await written([1] * 40, [2] * 40)
    one, two = lines(path)
    monkeypatch.setattr(traffic_trace, "MAX_BYTES", path.stat().st_size * 3 // 4)
    path.write_text(json.dumps({**two, "timestamp": 7_000_000}) + '\n{"timestamp":7')  # where the machine went down
    await written([], [1] * 40, [], [1] * 40, room=2000)
    assert [row["hash_ids"] == one["hash_ids"] for row in lines(path)] == [False, False]
    assert [row["timestamp"] >= 7_000_000 for row in lines(path)] == [True, True] and one["output_length"] == 1
    assert dict(metrics.traced) == {("written",): 3, ("lost",): 2, ("no_room",): 1}
    assert "no room behind its" in caplog.text and "AttributeError" in caplog.text
    monkeypatch.setattr(traffic_trace, "STOP_SECONDS", 0.01)
    path.unlink()
    await written([], [], worker=SimpleNamespace(renderer=lambda *_: asyncio.Event().wait()))
    assert "2 requests are missing" in caplog.text
    with pytest.raises(AttributeError):  # what a worker cuts off, it alone knows
        await prompt_of(completions_request({"prompt": [1, 2, 3], "truncate_prompt_tokens": 2}), None)
    path.write_text("[1]\n")
    for wrong, why in ((path, "it holds something else"), (tmp_path / "no" / "file", "No such file")):
        with pytest.raises(SettingsError, match=f"cannot get a trace .{why}.*name another file"):
            TrafficTrace(wrong, 1, metrics.traced, IdleWork())
