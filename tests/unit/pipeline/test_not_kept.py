"""Requests of which nothing may be kept: what a worker gets, and what the gateway knows of them afterwards."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

import pytest

from tests.harness.api_keys import bearer, entry
from tests.harness.gateways import CHAT, chat
from tests.harness.in_memory_gateway import InMemoryGateway, learnt, told
from tests.harness.recording_worker import RecordingWorker
from tests.harness.waiting import until

LONG = "All vessels in the roads keep to the east. " * 500  # so long that bodies are remembered


class Row(NamedTuple):
    header: str | None = None
    key: str = "plain"
    xarg: str | None = None
    keep: str = "told"  # of the worker's engine
    path: str = CHAT
    told: str | None = "no"  # that its engine gets
    salted: bool = False  # with a salt of its own
    said: str | None = "no"  # in the answer's head
    status: int = 200
    fields: dict[str, Any] = {}  # noqa: RUF012


ROWS = {
    "a header": Row("no"),
    "a header, privately": Row("Private ", salted=True, said="private"),
    "a key": Row(key="careful"),
    "a key is stricter than its client": Row("no", "private", salted=True, said="private"),
    "a client is stricter than its key": Row("private", "careful", salted=True, said="private"),
    "a header, twice": Row("no, Private", salted=True, said="private"),
    "a header that is empty once": Row(", no"),
    "a trusted hop": Row(xarg="no"),
    "arguments that are no object": Row("no", fields={"vllm_xargs": []}, told=None, salted=True),
    "a header is stricter than a body": Row("private", xarg="no", salted=True, said="private"),
    "an engine that cannot be told": Row("no", keep="", salted=True),
    "a beam search, which tells no engine": Row("no", fields={"use_beam_search": True}, told=None, salted=True),
    "a path that tells no engine": Row("no", path="/v1/embeddings", told=None, salted=True),
    "a response": Row("no", path="/v1/responses"),
    "a message": Row("no", path="/v1/messages"),
    "low priority": Row(key="low", told="low", said=None),
    "low priority, and not kept": Row("no", "low"),
    "all as ever": Row(told=None, said=None),
    "no such value": Row("yes", status=400),
    "no such value in a body": Row(xarg="never", status=400),
    "an engine that stores by itself": Row("no", keep="KV connector X may store it by itself", status=400),
    "a body that is no JSON": Row("no", path="/v1/audio/transcriptions", status=400),
}


def held(own: InMemoryGateway) -> list[int]:
    """What the gateway knows of prompts, by place."""
    gateway, reader = own.gateway, own.gateway.reader
    assert gateway.response_cache is not None
    texts = (reader.held, len(reader.bodies._in_vain), gateway.shadow.held)
    return [*texts, len(gateway.prefix_index), len(gateway.warmup), len(gateway.response_cache.answers)]


@pytest.mark.parametrize("row", ROWS.values(), ids=ROWS)
async def test_nothing_is_known_of_what_may_not_be_kept(in_memory, tmp_path, row):
    keys = tmp_path / "keys.toml"
    careful = entry("careful", keep="no") + entry("private", keep="private") + entry("low", priority="low")
    keys.write_text(entry("plain") + careful + entry("root", admin=True))
    workers = [RecordingWorker(keep=row.keep) for _ in range(2)]
    own = await in_memory(*workers, api_keys=keys, response_cache=2**20, response_cache_models=("*",))
    await learnt(own)
    before = held(own)
    body: Any = chat("Tide?", system=LONG, temperature=0, **row.fields)
    body |= {"input": body["messages"]} if row.path == "/v1/responses" else {}
    body |= {"vllm_xargs": {"a": 1, "seamark_keep": row.xarg}} if row.xarg is not None else {}
    body = json.dumps(body).replace("seamark_keep", "seam\\u0061rk_keep").encode()
    body = b"RIFF" if "audio" in row.path else body
    headers = bearer(row.key) | ({"x-seamark-keep": row.header} if row.header is not None else {})
    for _ in range(2):
        answer = await own.post(body, row.path, **headers)
        assert answer.status_code == row.status, answer.text
    await told(*workers)
    if row.status != 200:
        assert "seamark" in answer.text and "keep" in answer.text and not sum(len(each.requests) for each in workers)
        return
    assert answer.headers.get("x-seamark-keep") == row.said
    sent = [request.fields for each in workers for request in each.requests if request.path == row.path]
    salts = {each["cache_salt"] for each in sent}
    assert {(each.get("vllm_xargs") or {}).get("seamark_keep") for each in sent} == {row.told}
    heads = {request.header(b"x-seamark-keep").decode() for each in workers for request in each.requests}
    assert heads == {row.said or ""}  # for a gateway that stands behind this one
    if row.said is None:
        assert held(own) != before and len(salts) == 1
        return
    assert len(sent) == 2 and len(salts) == (2 if row.salted else 1)
    assert held(own) == before and all(each.get("store", False) is False for each in sent)
    assert not any("seamark_boundaries" in each.get("vllm_xargs", {}) for each in sent)
    by = "engine" if row.keep and row.told else "salt"
    assert own.metric("seamark_not_kept_total", by=by) == 2
    if row.path == CHAT:
        told_of_it = (await own.get(f"/seamark/requests/{answer.headers['x-request-id']}", **bearer("root"))).json()
        assert (told_of_it["keep"], told_of_it["boundaries"], told_of_it["reason"]) == (row.said, [], "hit")


async def test_a_request_that_waits_for_a_slot_in_vain_leaves_no_more(in_memory):
    worker = RecordingWorker(keep="told")
    own = await in_memory(worker, max_inflight=1, queue_timeout=0.2)
    await learnt(own)
    worker.hold.set()
    first = own.opened(chat("Whose turn?"))
    await until(lambda: worker.requests)
    answer = await own.post(chat("Tide?"), x_seamark_keep="no")
    first.leave()
    said = (await own.get(f"/seamark/requests/{answer.headers['x-request-id']}")).json()
    assert (said["status"], said["keep"], said["boundaries"]) == (503, "no", [])
