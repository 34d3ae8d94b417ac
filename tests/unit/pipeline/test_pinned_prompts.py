"""Prompts that are kept in every worker's cache: by request and by file, after restarts, and nobody else's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from proxy.errors import SettingsError
from proxy.pipeline import pinned_prompts
from proxy.pipeline.gateway import Gateway
from proxy.settings import Settings
from tests.harness.api_keys import bearer, entry
from tests.harness.gateways import LAST_USER, TURN_END, chat
from tests.harness.in_memory_gateway import InMemoryGateway
from tests.harness.recording_worker import RecordingWorker
from tests.harness.waiting import until

PATH = "/seamark/prefixes"

NOT_READ_YET = {"role": "user", "content": "not read yet"}


@pytest.fixture
def worker() -> RecordingWorker:
    return RecordingWorker(cached=0)


@pytest.fixture
async def own(in_memory, worker) -> InMemoryGateway:
    return await in_memory(worker)


async def pin(own: InMemoryGateway, name: str = "rules", body: Any = None, **more: Any) -> httpx.Response:
    body = chat("Tide?") if body is None else body
    headers = more.pop("headers", {})
    return await own.post({"name": name, "body": body, **more}, PATH, **headers)


def pinned(worker: RecordingWorker) -> int:
    return len(worker.engine.pinned)


async def is_pinned(own: InMemoryGateway, worker: RecordingWorker) -> bool:
    return pinned(worker) == 1 and await word(own, worker) == "pinned"


async def word(own: InMemoryGateway, worker: RecordingWorker, name: str = "rules") -> str:
    listed = {each["name"]: each for each in (await own.get(PATH)).json()["prefixes"]}
    return listed[name]["workers"][worker.url.split("://")[1]] if name in listed else ""


async def test_a_prompt_is_sent_once_with_its_hint_and_the_wish(own, worker):
    answer = await pin(own)
    assert answer.status_code == 200, answer.text
    (sent,) = worker.requests
    body = json.loads(sent.body)
    assert body["vllm_xargs"] == {"seamark_boundaries": [LAST_USER, TURN_END], "seamark_pin": 1}
    assert (body["max_tokens"], body["stream"]) == (1, False)
    told = answer.json()
    assert told["workers"] == {worker.url.split("://")[1]: "pinned"} and told["tokens"] > 100
    assert await word(own, worker) == "pinned" and pinned(worker) == 1
    status = (await own.get("/seamark/status")).json()
    assert status["prefixes"] == (await own.get(PATH)).json()["prefixes"] == [told]
    assert "harbour" not in json.dumps(status)  # no text of it


async def test_a_request_that_shares_it_is_expected_to_hit(own, worker):
    await pin(own)
    answer = await own.post(chat("Ebb?"), "/v1/chat/completions")
    assert int(answer.headers["x-seamark-predicted"]) > 400


async def test_one_that_is_taken_back_is_released_and_gone(own, worker):
    await pin(own)
    answer = await own.client.delete(f"{PATH}/rules")
    assert answer.json()["workers"] == {worker.url.split("://")[1]: "released"}
    assert not pinned(worker) and (await own.get(PATH)).json() == {"prefixes": []}
    assert json.loads(worker.requests[-1].body)["vllm_xargs"]["seamark_pin"] == 0
    again = await own.client.delete(f"{PATH}/rules")
    assert again.status_code == 404 and again.json()["error"]["code"] == "not_found"


async def test_another_prompt_of_the_name_takes_its_place(own, worker):
    await pin(own)
    await pin(own, body=chat("Ebb?"))
    assert pinned(worker) == 1 and "Ebb?" in worker.engine.pinned[0][1]


async def test_without_room_it_is_refused_with_the_cure_and_pinned_once_there_is(own, worker):
    worker.engine.room = 1
    await pin(own)
    refused = await pin(own, "more", chat("Ebb?"))
    assert refused.status_code == 409 and refused.json()["error"]["code"] == "no_room"
    assert "SEAMARK_PIN_SHARE" in refused.json()["error"]["message"]
    assert [each["name"] for each in (await own.get(PATH)).json()["prefixes"]] == ["rules"]
    await own.client.delete(f"{PATH}/rules")
    assert (await pin(own, "more", chat("Ebb?"))).status_code == 200 and pinned(worker) == 1


async def test_a_worker_that_has_restarted_is_given_it_before_its_requests(own, worker):
    await pin(own)
    worker.requests.clear()
    worker.boot = "1.8e+09"
    await until(lambda: is_pinned(own, worker))
    assert json.loads(worker.requests[0].body)["vllm_xargs"]["seamark_pin"] == 1


async def test_a_cache_that_was_emptied_is_given_it_again(own, worker):
    await pin(own)
    worker.engine.clear()
    await until(lambda: is_pinned(own, worker))


async def test_an_adapter_that_was_replaced_is_given_its_own_again(own, worker):
    await pin(own)
    worker.engine.replace_adapter("m")
    await until(lambda: is_pinned(own, worker))


async def test_each_worker_that_serves_the_model_holds_it(in_memory):
    one = RecordingWorker(cached=0)
    two = RecordingWorker(cached=0)
    other = RecordingWorker(models=("x",))
    own = await in_memory(one, two, other)
    await pin(own)
    assert (pinned(one), pinned(two), pinned(other)) == (1, 1, 0)
    assert await word(own, other) == "waiting"


async def test_one_worker_without_room_does_not_refuse_it_for_the_others(in_memory):
    one = RecordingWorker(cached=0)
    two = RecordingWorker(cached=0)
    two.engine.room = 0
    own = await in_memory(one, two)
    assert (await pin(own)).status_code == 200
    assert (await word(own, one), await word(own, two)) == ("pinned", "no_room")


async def test_what_the_answer_does_not_say_the_engines_report_does(in_memory):
    one, full = (RecordingWorker(cached=0, has_middleware=False) for _ in range(2))
    full.engine.room = 0
    own = await in_memory(one, full)
    assert (await pin(own)).status_code == 200
    assert (await word(own, one), await word(own, full)) == ("pinned", "no_room")
    assert len(one.requests) == len(full.requests) == 1


@pytest.mark.parametrize("version", ["0.2.0", "0.3.0"])
async def test_a_worker_that_says_nothing_of_pins_is_not_asked_again(in_memory, version, monkeypatch):
    monkeypatch.setattr(pinned_prompts, "RETRY_SECONDS", 0.0)
    worker = RecordingWorker(version=version, cached=0)
    own = await in_memory(worker)
    worker.engine._pin = lambda *_: ""  # type: ignore[method-assign]
    assert (await pin(own)).status_code == 200
    await word(own, worker)
    if version == "0.3.0":
        assert await word(own, worker) == "not_told" and len(worker.requests) == 1
    else:
        assert await word(own, worker) == "no_facts"  # it takes positions alone, of which none is known


async def test_a_worker_that_fails_is_asked_again(own, worker, monkeypatch, caplog):
    monkeypatch.setattr(pinned_prompts, "RETRY_SECONDS", 0.2)
    worker.status = 500
    assert (await pin(own)).status_code == 200 and await word(own, worker) == "failed"
    assert "prompt rules is not pinned" in caplog.text
    worker.status = 200
    await until(lambda: is_pinned(own, worker))


async def test_of_a_prompt_that_is_pinned_and_released_nothing_is_warned(own, worker, caplog):
    assert (await pin(own)).status_code == 200
    assert (await own.client.delete(f"{PATH}/rules")).status_code == 200
    assert [record for record in caplog.records if record.name == "seamark.pinned_prompts"] == []


async def test_a_client_cannot_pin(own, worker):
    for xargs in ({"seamark_pin": 1}, {"seamark_pin": 1, "mine": 2}):
        await own.post(chat("Tide?", vllm_xargs=xargs), "/v1/chat/completions")
        sent = json.loads(worker.requests[-1].body)["vllm_xargs"]
        assert "seamark_pin" not in sent and sent.get("mine") == xargs.get("mine")
    files = {"file": ("a.wav", b"RIFF"), "vllm_xargs": (None, '{"seamark_pin": 1}')}
    assert (await own.client.post("/v1/audio/transcriptions", files=files)).status_code == 400
    assert not pinned(worker)


@pytest.mark.parametrize(
    ("wrong", "param", "words"),
    [
        ({"name": "a"}, "body", "body"),
        ({"body": chat("?")}, "name", "name"),
        ({"name": "", "body": chat("?")}, "name", "name"),
        ({"name": "a/b", "body": chat("?")}, "name", "name"),
        ({"name": "a" * 200, "body": chat("?")}, "name", "name"),
        ({"name": "a", "body": {"messages": [NOT_READ_YET]}}, "body", "body.model"),
        ({"name": "a", "body": {"model": "m", "messages": []}}, "body", "body.messages"),
        ({"name": "a", "body": {"model": "m", "prompt": "x"}}, "body", "body.messages"),
        ({"name": "a", "body": chat("?"), "key": "ann"}, "key", "no API keys"),
        ({"name": "a", "body": chat("?"), "kye": "ann"}, "kye", "kye"),
        ("not an object", None, "object"),
    ],
)
async def test_what_is_no_prompt_is_refused_with_the_field(own, worker, wrong, param, words):
    answer = await own.post(wrong, PATH)
    error = answer.json()["error"]
    assert answer.status_code == 400 and error["param"] == param and words in error["message"]
    assert "harbour" not in answer.text and not worker.requests


async def test_no_more_than_can_be_kept(own, monkeypatch):
    monkeypatch.setattr(pinned_prompts, "MOST_PROMPTS", 2)
    assert [(await pin(own, name, chat(name))).status_code for name in ("a", "b", "c", "a")] == [200, 200, 400, 200]
    monkeypatch.setattr(pinned_prompts, "MOST_BYTES", 100)
    assert (await pin(own, "a", chat("longer"))).json()["error"]["param"] == "body"


async def test_another_sites_page_pins_nothing(own):
    headers = {"sec-fetch-site": "cross-site"}
    assert (await pin(own, headers=headers)).status_code == 403
    assert (await own.client.delete(f"{PATH}/rules", headers=headers)).status_code == 403


async def test_with_keys_it_is_an_operators_and_one_groups(in_memory, worker, tmp_path: Path):
    keys, secret = tmp_path / "keys.toml", tmp_path / "secret"
    keys.write_text(entry("ann", share="team") + entry("bob", share="team") + entry("cleo") + entry("root", admin=True))
    secret.write_text("salt secret\n")
    own = await in_memory(worker, api_keys=keys, salt_secret_file=secret)
    admin = bearer("root")
    assert [(await pin(own, headers=headers)).status_code for headers in ({}, bearer("ann"))] == [401, 403]
    assert (await pin(own, headers=admin)).json()["error"]["param"] == "key"
    assert (await pin(own, headers=admin, key="dan")).json()["error"]["param"] == "key"
    assert (await pin(own, headers=admin, key="ann")).status_code == 200
    salts = []
    for name in ("bob", "cleo"):
        await own.post(chat("Ebb?"), "/v1/chat/completions", **bearer(name))
        salts.append(json.loads(worker.requests[-1].body)["cache_salt"])
    ((salt, _),) = worker.engine.pinned
    assert salts[0] == salt != salts[1]
    assert (await pin(own, "cleo's", headers=admin, key="cleo")).status_code == 200
    assert [each for each, _ in worker.engine.pinned] == salts  # what is for cleo is for cleo alone
    assert [(await own.get(PATH, **bearer(name))).status_code for name in ("ann", "root")] == [403, 200]


async def test_what_is_pinned_for_a_key_moves_with_it_to_another_group(in_memory, worker, tmp_path: Path):
    keys, admin = tmp_path / "keys.toml", bearer("root")
    keys.write_text(entry("ann") + entry("bob", share="team") + entry("root", admin=True))
    own = await in_memory(worker, api_keys=keys)
    assert (await pin(own, headers=admin, key="ann")).status_code == 200
    ((old, prompt),) = worker.engine.pinned
    keys.write_text(entry("ann", share="team") + entry("bob", share="team") + entry("root", admin=True) + "\n")
    own.gateway.read_files()
    await until(lambda: pinned(worker) == 1 and worker.engine.pinned[0][0] != old)
    await own.post(chat("Ebb?"), "/v1/chat/completions", **bearer("bob"))
    assert worker.engine.pinned == [(json.loads(worker.requests[-1].body)["cache_salt"], prompt)]
    keys.write_text(entry("ann", share="others") + entry("root", admin=True))
    own.gateway.read_files()
    removed = await own.client.delete(f"{PATH}/rules", headers=admin)
    assert (removed.status_code, removed.json()["workers"]) == (200, {worker.url.split("://")[1]: "released"})
    assert pinned(worker) == 0


async def test_a_key_that_was_taken_out_leaves_pins_that_can_be_taken_back(in_memory, worker, tmp_path: Path):
    keys, admin = tmp_path / "keys.toml", bearer("root")
    keys.write_text(entry("ann") + entry("root", admin=True))
    own = await in_memory(worker, api_keys=keys)
    assert (await pin(own, headers=admin, key="ann")).status_code == 200 and pinned(worker) == 1
    keys.write_text(entry("root", admin=True))
    own.gateway.read_files()
    assert (await own.client.delete(f"{PATH}/rules", headers=admin)).status_code == 200
    assert pinned(worker) == 0


@pytest.mark.parametrize("lasting", [False, True])
async def test_a_gateway_that_stops_lets_go_what_no_other_start_could(in_memory, worker, tmp_path: Path, lasting):
    """Without `salt_secret_file`, keys have other salts at each start."""
    keys, secret = tmp_path / "keys.toml", tmp_path / "secret"
    keys.write_text(entry("ann") + entry("root", admin=True))
    secret.write_text("salt secret\n")
    own = await in_memory(worker, api_keys=keys, salt_secret_file=secret if lasting else None)
    assert (await pin(own, headers=bearer("root"), key="ann")).status_code == 200 and pinned(worker) == 1
    await own.gateway.pinned.let_go()
    assert pinned(worker) == lasting


async def test_what_could_not_be_let_go_at_a_stop_is_said(in_memory, worker, tmp_path: Path, caplog):
    keys = tmp_path / "keys.toml"
    keys.write_text(entry("ann") + entry("root", admin=True))
    own = await in_memory(worker, api_keys=keys)
    assert (await pin(own, headers=bearer("root"), key="ann")).status_code == 200
    worker.status = 500
    await own.gateway.pinned.let_go()
    assert "1 prompts stay pinned until workers restart" in caplog.text


async def test_a_worker_that_could_not_be_told_to_let_one_go_is_said_and_told_again(own, worker, monkeypatch):
    monkeypatch.setattr(pinned_prompts, "RETRY_SECONDS", 0.2)
    assert (await pin(own)).status_code == 200
    worker.status = 500
    removed = await own.client.delete(f"{PATH}/rules")
    assert (removed.status_code, list(removed.json()["workers"].values())) == (202, ["not_released"])
    assert pinned(worker) == 1
    worker.status = 200
    await until(lambda: pinned(worker) == 0)


def write(path: Path, **prompts: str) -> None:
    path.write_text(json.dumps([{"name": name, "body": chat(text)} for name, text in prompts.items()]))


async def test_a_file_names_prompts_and_is_followed(in_memory, worker, tmp_path: Path):
    path = tmp_path / "prefixes.json"
    write(path, rules="Tide?", log="Ebb?")
    own = await in_memory(worker, prefixes_file=path)
    await until(lambda: pinned(worker) == 2)
    write(path, rules="Tide?", other="Wind?")
    own.gateway.read_files()
    await until(lambda: sorted(prompt[-16:-11] for _, prompt in worker.engine.pinned) == ["Tide?", "Wind?"])
    path.write_text("[")
    own.gateway.read_files()
    assert pinned(worker) == 2 and not own.gateway.pinned.file.is_current
    refused = await own.client.delete(f"{PATH}/rules")
    assert refused.status_code == 400 and "prefixes_file" in refused.json()["error"]["message"]
    assert (await pin(own, "rules", chat("Wind?"))).status_code == 400


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("{}", "array"),
        ("[", "JSON"),
        ('[{"name": "a"}]', "0.body"),
        ('[{"name": "a", "body": {"model": "m"}}]', "'a': body.messages"),
        ('[{"name": "a", "body": {"model": "m", "messages": [{"secret": 1}]}, "key": "ann"}]', "no API keys"),
        ('[{"name": "a", "body": {"model": "m", "messages": [{"secret": NaN}]}}]', "NaN"),
        ('[{"name": "a", "body": {"model": "m", "messages": [{"secret": 1e999}]}}]', "body"),
        ('[{"name": "a", "body": {"messages": [{}], "model": "m", "seed": ' + "7" * 5000 + "}}]", "number"),
        ('[{"name": "a", "body": {"messages": [{}], "x":' + "[" * 10**5 + "]" * 10**5 + "}}]", "recursion"),
        ('[{"name": "a\\ud800", "body": {"model": "m", "messages": [{}]}}]', "JSON"),
        ('[{"name": "a\\u009b31mRED", "body": {"model": "m", "messages": [{}]}}]', "0.name: it has characters"),
        ('[{"name": "a\\u202e", "body": {"model": "m", "messages": [{}]}}]', "0.name: it has characters"),
    ],
)
async def test_a_file_that_cannot_be_used_stops_the_start_with_one_line(
    in_memory, worker, tmp_path: Path, content, words
):
    path = tmp_path / "prefixes.json"
    path.write_text(content)
    with pytest.raises(SettingsError) as error:
        await in_memory(worker, prefixes_file=path)
    assert words in str(error.value) and "secret" not in str(error.value) and "prefixes_file" in str(error.value)
    with pytest.raises(SettingsError, match="cannot be read"):
        Gateway(Settings(prefixes_file=tmp_path / "none.json"))


async def test_in_shadow_mode_nothing_is_pinned(in_memory, worker):
    own = await in_memory(worker, shadow=True)
    assert (await pin(own)).status_code == 200 and await word(own, worker) == "waiting" and not worker.requests
