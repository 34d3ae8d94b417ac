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
from tests.harness.gateways import LAST_USER, TURN_END, OwnGateway, chat, own_gateway, wait_for
from tests.harness.recording_worker import RecordingWorker, recording_worker

PATH = "/seamark/prefixes"

NOT_READ_YET = {"role": "user", "content": "not read yet"}


@pytest.fixture
def worker():
    with recording_worker(cached=0) as started:
        yield started


@pytest.fixture
def own(worker):
    with own_gateway(worker) as started:
        wait_for(lambda: started.gateway.pool.up)
        yield started


def pin(own: OwnGateway, name: str = "rules", body: Any = None, **more: Any) -> httpx.Response:
    body = chat("Tide?") if body is None else body
    options = {"headers": more.pop("headers", {})}
    return httpx.post(own.url + PATH, json={"name": name, "body": body, **more}, timeout=30, **options)


def pinned(worker: RecordingWorker) -> int:
    return len(worker.engine.pinned)


def word(own: OwnGateway, worker: RecordingWorker, name: str = "rules") -> str:
    listed = {each["name"]: each for each in httpx.get(own.url + PATH).json()["prefixes"]}
    return listed[name]["workers"][worker.url.split("://")[1]] if name in listed else ""


def test_a_prompt_is_sent_once_with_its_hint_and_the_wish(own, worker):
    answer = pin(own)
    assert answer.status_code == 200, answer.text
    (sent,) = worker.requests
    body = json.loads(sent.body)
    assert body["vllm_xargs"] == {"seamark_boundaries": [LAST_USER, TURN_END], "seamark_pin": 1}
    assert (body["max_tokens"], body["stream"]) == (1, False)
    told = answer.json()
    assert told["workers"] == {worker.url.split("://")[1]: "pinned"} and told["tokens"] > 100
    assert word(own, worker) == "pinned" and pinned(worker) == 1
    status = httpx.get(own.url + "/seamark/status").json()
    assert status["prefixes"] == httpx.get(own.url + PATH).json()["prefixes"] == [told]
    assert "harbour" not in json.dumps(status)  # no text of it


def test_a_request_that_shares_it_is_expected_to_hit(own, worker):
    pin(own)
    answer = httpx.post(own.url + "/v1/chat/completions", json=chat("Ebb?"))
    assert int(answer.headers["x-seamark-predicted"]) > 400


def test_one_that_is_taken_back_is_released_and_gone(own, worker):
    pin(own)
    answer = httpx.delete(f"{own.url}{PATH}/rules", timeout=30)
    assert answer.json()["workers"] == {worker.url.split("://")[1]: "released"}
    assert not pinned(worker) and httpx.get(own.url + PATH).json() == {"prefixes": []}
    assert json.loads(worker.requests[-1].body)["vllm_xargs"]["seamark_pin"] == 0
    again = httpx.delete(f"{own.url}{PATH}/rules")
    assert again.status_code == 404 and again.json()["error"]["code"] == "not_found"


def test_another_prompt_of_the_name_takes_its_place(own, worker):
    pin(own)
    pin(own, body=chat("Ebb?"))
    assert pinned(worker) == 1 and "Ebb?" in worker.engine.pinned[0][1]


def test_without_room_it_is_refused_with_the_cure_and_pinned_once_there_is(own, worker):
    worker.engine.room = 1
    pin(own)
    refused = pin(own, "more", chat("Ebb?"))
    assert refused.status_code == 409 and refused.json()["error"]["code"] == "no_room"
    assert "SEAMARK_PIN_SHARE" in refused.json()["error"]["message"]
    assert [each["name"] for each in httpx.get(own.url + PATH).json()["prefixes"]] == ["rules"]
    httpx.delete(f"{own.url}{PATH}/rules", timeout=30)
    assert pin(own, "more", chat("Ebb?")).status_code == 200 and pinned(worker) == 1


def test_a_worker_that_has_restarted_is_given_it_before_its_requests(own, worker):
    pin(own)
    worker.requests.clear()
    worker.boot = "1.8e+09"
    wait_for(lambda: pinned(worker) == 1 and word(own, worker) == "pinned")
    assert json.loads(worker.requests[0].body)["vllm_xargs"]["seamark_pin"] == 1


def test_a_cache_that_was_emptied_is_given_it_again(own, worker):
    pin(own)
    worker.engine.clear()
    wait_for(lambda: pinned(worker) == 1)
    wait_for(lambda: word(own, worker) == "pinned")


def test_an_adapter_that_was_replaced_is_given_its_own_again(own, worker):
    pin(own)
    worker.engine.replace_adapter("m")
    wait_for(lambda: pinned(worker) == 1)
    wait_for(lambda: word(own, worker) == "pinned")


def test_each_worker_that_serves_the_model_holds_it():
    with (
        recording_worker(cached=0) as one,
        recording_worker(cached=0) as two,
        recording_worker(models=("x",)) as other,
        own_gateway(one, two, other) as own,
    ):
        wait_for(lambda: len(own.gateway.pool.up) == 3)
        pin(own)
        assert (pinned(one), pinned(two), pinned(other)) == (1, 1, 0)
        assert word(own, other) == "waiting"


def test_one_worker_without_room_does_not_refuse_it_for_the_others():
    with recording_worker(cached=0) as one, recording_worker(cached=0) as two:
        two.engine.room = 0
        with own_gateway(one, two) as own:
            wait_for(lambda: len(own.gateway.pool.up) == 2)
            assert pin(own).status_code == 200
            assert (word(own, one), word(own, two)) == ("pinned", "no_room")


@pytest.mark.parametrize("version", ["0.2.0", "0.3.0"])
def test_a_worker_that_says_nothing_of_pins_is_not_asked_again(version, monkeypatch):
    monkeypatch.setattr(pinned_prompts, "RETRY_SECONDS", 0.0)
    with recording_worker(version=version, cached=0) as worker, own_gateway(worker) as own:
        wait_for(lambda: own.gateway.pool.up)
        worker.engine._pin = lambda *_: ""  # type: ignore[method-assign]
        assert pin(own).status_code == 200
        word(own, worker)
        if version == "0.3.0":
            assert word(own, worker) == "not_told" and len(worker.requests) == 1
        else:
            assert word(own, worker) == "no_facts"  # it takes positions alone, of which none is known


def test_a_worker_that_fails_is_asked_again(own, worker, monkeypatch):
    monkeypatch.setattr(pinned_prompts, "RETRY_SECONDS", 0.2)
    worker.status = 500
    assert pin(own).status_code == 200 and word(own, worker) == "failed"
    worker.status = 200
    wait_for(lambda: word(own, worker) == "pinned")


def test_a_client_cannot_pin(own, worker):
    for xargs in ({"seamark_pin": 1}, {"seamark_pin": 1, "mine": 2}):
        httpx.post(own.url + "/v1/chat/completions", json=chat("Tide?", vllm_xargs=xargs))
        sent = json.loads(worker.requests[-1].body)["vllm_xargs"]
        assert "seamark_pin" not in sent and sent.get("mine") == xargs.get("mine")
    files = {"file": ("a.wav", b"RIFF"), "vllm_xargs": (None, '{"seamark_pin": 1}')}
    assert httpx.post(own.url + "/v1/audio/transcriptions", files=files).status_code == 400
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
def test_what_is_no_prompt_is_refused_with_the_field(own, worker, wrong, param, words):
    answer = httpx.post(own.url + PATH, json=wrong)
    error = answer.json()["error"]
    assert answer.status_code == 400 and error["param"] == param and words in error["message"]
    assert "harbour" not in answer.text and not worker.requests


def test_no_more_than_can_be_kept(own, monkeypatch):
    monkeypatch.setattr(pinned_prompts, "MOST_PROMPTS", 2)
    assert [pin(own, name, chat(name)).status_code for name in ("a", "b", "c", "a")] == [200, 200, 400, 200]
    monkeypatch.setattr(pinned_prompts, "MOST_BYTES", 100)
    assert pin(own, "a", chat("longer")).json()["error"]["param"] == "body"


def test_another_sites_page_pins_nothing(own):
    headers = {"sec-fetch-site": "cross-site"}
    assert pin(own, headers=headers).status_code == 403
    assert httpx.delete(f"{own.url}{PATH}/rules", headers=headers).status_code == 403


def test_with_keys_it_is_an_operators_and_one_groups(worker, tmp_path: Path):
    keys, secret = tmp_path / "keys.toml", tmp_path / "secret"
    keys.write_text(entry("ann", share="team") + entry("bob", share="team") + entry("cleo") + entry("root", admin=True))
    secret.write_text("salt secret\n")
    with own_gateway(worker, api_keys=keys, salt_secret_file=secret) as own:
        wait_for(lambda: own.gateway.pool.up)
        admin = bearer("root")
        assert [pin(own, headers=headers).status_code for headers in ({}, bearer("ann"))] == [401, 403]
        assert pin(own, headers=admin).json()["error"]["param"] == "key"
        assert pin(own, headers=admin, key="dan").json()["error"]["param"] == "key"
        assert pin(own, headers=admin, key="ann").status_code == 200
        salts = []
        for name in ("bob", "cleo"):
            httpx.post(own.url + "/v1/chat/completions", json=chat("Ebb?"), headers=bearer(name))
            salts.append(json.loads(worker.requests[-1].body)["cache_salt"])
        ((salt, _),) = worker.engine.pinned
        assert salts[0] == salt != salts[1]
        assert pin(own, "cleo's", headers=admin, key="cleo").status_code == 200
        assert [each for each, _ in worker.engine.pinned] == salts  # what is for cleo is for cleo alone
        assert [httpx.get(own.url + PATH, headers=bearer(name)).status_code for name in ("ann", "root")] == [403, 200]


def write(path: Path, **prompts: str) -> None:
    path.write_text(json.dumps([{"name": name, "body": chat(text)} for name, text in prompts.items()]))


def test_a_file_names_prompts_and_is_followed(worker, tmp_path: Path):
    path = tmp_path / "prefixes.json"
    write(path, rules="Tide?", log="Ebb?")
    with own_gateway(worker, prefixes_file=path) as own:
        wait_for(lambda: pinned(worker) == 2)
        write(path, rules="Tide?", other="Wind?")
        own.gateway.read_files()
        wait_for(lambda: sorted(prompt[-16:-11] for _, prompt in worker.engine.pinned) == ["Tide?", "Wind?"])
        path.write_text("[")
        own.gateway.read_files()
        assert pinned(worker) == 2 and not own.gateway.pinned.file.is_current
        refused = httpx.delete(f"{own.url}{PATH}/rules")
        assert refused.status_code == 400 and "prefixes_file" in refused.json()["error"]["message"]
        assert pin(own, "rules", chat("Wind?")).status_code == 400


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("{}", "array"),
        ("[", "JSON"),
        ('[{"name": "a"}]', "0.body"),
        ('[{"name": "a", "body": {"model": "m"}}]', "'a': body.messages"),
        ('[{"name": "a", "body": {"model": "m", "messages": [{"secret": 1}]}, "key": "ann"}]', "no API keys"),
    ],
)
def test_a_file_that_cannot_be_used_stops_the_start_with_one_line(worker, tmp_path: Path, content, words):
    path = tmp_path / "prefixes.json"
    path.write_text(content)
    with pytest.raises(SettingsError) as error, own_gateway(worker, prefixes_file=path):
        pass
    assert words in str(error.value) and "secret" not in str(error.value) and "prefixes_file" in str(error.value)
    with pytest.raises(SettingsError, match="cannot be read"):
        Gateway(Settings(prefixes_file=tmp_path / "none.json"))


def test_in_shadow_mode_nothing_is_pinned(worker):
    with own_gateway(worker, shadow=True) as own:
        wait_for(lambda: own.gateway.pool.up)
        assert pin(own).status_code == 200 and word(own, worker) == "waiting" and not worker.requests
