"""The figures behind the live page, and who may read them."""

from __future__ import annotations

import contextlib
import json
import re
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from proxy.commands.render_server import free_port
from proxy.observability import reasons
from proxy.observability.reasons import REASON_TEXT
from proxy.server import live_page
from tests.harness.api_keys import bearer, entry
from tests.harness.fake_engine import template
from tests.harness.gateways import CHAT, SYSTEM, OwnGateway, chat, own_gateway, told
from tests.harness.recording_worker import RecordingWorker, recording_worker
from tests.harness.waiting import wait_for

GATEWAY = (Path(__file__).parents[2] / "proxy" / "README.md").read_text()


@pytest.fixture
def worker() -> Iterator[RecordingWorker]:
    with recording_worker() as started:
        yield started


@pytest.fixture
def own(worker) -> Iterator[OwnGateway]:
    with own_gateway(worker) as started:
        wait_for(lambda: all(worker.up for worker in started.gateway.pool.workers))
        yield started


def live(own: OwnGateway, **options) -> dict:
    answer = httpx.get(own.url + "/seamark/live", **options)
    assert answer.status_code == 200 and answer.headers["cache-control"] == "no-store"
    return answer.json()


def ask(own: OwnGateway, body: dict, request_id: str) -> httpx.Response:
    return httpx.post(own.url + CHAT, content=json.dumps(body), headers={"x-request-id": request_id}, timeout=30)


def test_requests_are_told_newest_first_with_what_they_got(own, worker):
    worker.cached = 0
    ask(own, chat("one"), "first")
    told(worker)
    worker.cached = 160
    ask(own, chat("two"), "second")
    figures = live(own)
    second, first = figures["requests"]
    assert (second["request_id"], first["request_id"]) == ("second", "first")
    shareable = len(f"<system>{SYSTEM['content']}<user>") // 16 * 16
    prompt = len(template(chat("one")))
    assert (first["prompt"], first["shareable"], first["delivered"], first["reason"]) == (prompt, 0, 0, "cold")
    assert (second["prompt"], second["shareable"], second["delivered"]) == (prompt, shareable, 160)
    assert second["status"] == 200 and figures["since"] < first["began"] <= second["began"] <= figures["now"]
    assert figures["efficiency"]["now"] == figures["efficiency"]["hour"] == figures["efficiency"]["minutes"][-1]
    assert figures["efficiency"]["now"] == pytest.approx(160 / shareable)
    assert figures["sums"]["whole"] == {
        "requests": 2,
        "prompt": 2 * prompt,
        "shareable": shareable,
        "came": 160,
        "delivered": 160,
        "changed": 0,
    }
    assert figures["changing"] is None


def test_one_that_is_under_way_has_no_status_and_one_that_failed_has_its_own(own, worker):
    worker.status = 500
    ask(own, chat("one"), "failed")
    worker.hold.set()
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(
            own.url + CHAT, json=chat("two"), headers={"x-request-id": "left"}, timeout=httpx.Timeout(30, read=0.5)
        )
    wait_for(lambda: live(own)["requests"][0]["status"] == 499)
    worker.status = 200
    with httpx.Client() as client:
        request = client.build_request("POST", own.url + CHAT, json=chat("three"), headers={"x-request-id": "held"})
        asking = threading.Thread(target=client.send, args=(request,))
        asking.start()
        wait_for(lambda: live(own)["inflight"] == 1)
        held, left, failed = live(own)["requests"]
        worker.hold.clear()
        asking.join()
    assert (held["request_id"], held["status"], held["reason"]) == ("held", None, None)
    assert (left["status"], failed["status"]) == (499, 500)
    assert failed["worker"] == worker.url.removeprefix("http://") and failed["model"] == "m"
    assert live(own)["requests"][0]["status"] == 200


def test_a_worker_that_ends_is_an_alarm_and_one_that_never_answered_too(worker):
    with contextlib.ExitStack() as other_runs:
        other = other_runs.enter_context(recording_worker())
        never = RecordingWorker(url=f"http://127.0.0.1:{free_port()}")
        name, absent = (each.url.removeprefix("http://") for each in (other, never))
        with own_gateway(worker, other, never) as own:
            wait_for(lambda: len(live(own)["alarms"]) == 1)
            assert live(own)["alarms"] == [
                f"Worker {absent} is down: connection refused: nothing listens there, or not yet. "
                "It has not served since the gateway started."
            ]
            other_runs.close()
            wait_for(lambda: len(live(own)["alarms"]) == 2)
            first = live(own)["alarms"][0]
            assert first.startswith(f"Worker {name} is down: ") and "not served" not in first


def test_no_prompt_text_is_told_and_halves_of_characters_break_nothing(own, worker):
    for question in ("secret tide", "secret ebb"):
        messages = [
            {"role": "system", "content": f"{question} \ud83d " + "harbour " * 100},
            *({"role": role, "content": "long speech " * 30} for role in ("user", "assistant", "user")),
        ]
        assert ask(own, {"model": "m", "messages": messages}, "x").status_code == 200
    answer = httpx.get(own.url + "/seamark/live")
    assert answer.json()["requests"][0]["request_id"] == "x"
    assert not re.search("secret|tide|ebb|harbour|speech", answer.text)


def test_every_reason_has_words_and_every_word_a_reason():
    described = set(
        re.findall(r"^\| `(\w+)` \|", GATEWAY.split("| reason in `seamark_miss_total`")[1].partition("\n\n")[0], re.M)
    )
    assert set(REASON_TEXT) == described | {"hit"}
    assert set(REASON_TEXT) >= reasons.ENGINE_CAUSES


def test_the_page_needs_no_key_and_its_figures_need_an_operators(worker, tmp_path):
    file = tmp_path / "keys.toml"
    file.write_text(entry("ann") + entry("root", admin=True))
    with own_gateway(worker, api_keys=file) as own:
        for path in ("/ui", "/ui/"):
            answer = httpx.get(own.url + path, follow_redirects=True)
            assert answer.status_code == 200 and answer.content == live_page.HTML
        assert httpx.get(own.url + "/ui/more").status_code == 401
        assert httpx.get(own.url + "/seamark/live").status_code == 401
        assert httpx.get(own.url + "/seamark/live", headers=bearer("ann")).status_code == 403
        assert live(own, headers=bearer("root"))["workers"]
