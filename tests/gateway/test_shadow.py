"""Shadow mode: nothing is changed, nobody waits, and what workers without the plugin lose is told by reason."""

from __future__ import annotations

import json
import random
import threading
from collections.abc import Iterator

import httpx
import pytest

from proxy.bench.harness.servers import Server
from proxy.commands.doctor import shadow_lines
from proxy.commands.render_server import free_port
from proxy.observability.prefill_cost import CostLearner, TokenWork
from proxy.observability.shadow import MATCH_UNIT
from proxy.settings import Settings
from tests.harness.api_keys import bearer, entry
from tests.harness.gateways import CHAT, SYSTEM, SYSTEM_END, chat, metric, post, start_gateway, wait_for
from tests.harness.recording_worker import EVENTS, RecordingWorker, recording_worker

LOST = "seamark_shadow_lost_tokens_total"


@pytest.fixture
def worker() -> Iterator[RecordingWorker]:
    with recording_worker(patched=False, cached=0) as started:
        yield started


def judged(gateway: Server, requests: int) -> dict:
    """The shadow's status once it has judged so many."""
    told: dict = {}

    def is_done() -> bool:
        told.update(httpx.get(gateway.url + "/seamark/status").json()["shadow"])
        return sum(told["requests"].values()) >= requests

    wait_for(is_done)
    return told


def test_what_a_worker_without_the_plugin_computes_again_is_told(fleet, worker):
    gateway = start_gateway(fleet, worker)
    ids = []
    for number, question in enumerate(("one", "two", "three"), 1):
        ids.append(post(gateway, chat(question)).headers["x-request-id"])
        told = judged(gateway, number)  # before the next comes
    lost = SYSTEM_END // MATCH_UNIT * MATCH_UNIT
    assert told["lost"]["unpatched"]["tokens"] == told["plugin_would_save"]["tokens"] == 2 * lost
    assert metric(gateway, f'{LOST}{{model="m",reason="unpatched"}}') == 2 * lost
    explained = [httpx.get(f"{gateway.url}/seamark/requests/{each}").json() for each in ids]
    assert [each["lost"] for each in explained] == [{}, {"unpatched": lost}, {"unpatched": lost}]
    assert explained[2]["reason"] == "unpatched"


@pytest.mark.parametrize(
    ("plugin", "reason", "warned"),
    [
        (
            {"patched": True, "refused": "a layer has a sliding window"},
            "hint_ignored",
            "no hints: a layer has",
        ),
        ({"more_metrics": "vllm:spec_decode_num_drafts_total 0.0\n"}, "unpatched", "with SEAMARK_DRAFTS=1"),
    ],
)
def test_nothing_is_promised_of_a_plugin_that_would_refuse_the_hints(fleet, worker, plugin, reason, warned):
    for name, value in plugin.items():
        setattr(worker, name, value)
    gateway = start_gateway(fleet, worker, flags=("--shadow",))
    for number, question in enumerate(("one", "two"), 1):
        answer = post(gateway, chat(question))
        told = judged(gateway, number)
    assert answer.headers["x-seamark-reason"] == reason
    assert told["lost"][reason]["tokens"] == SYSTEM_END // MATCH_UNIT * MATCH_UNIT
    assert told["plugin_would_save"]["tokens"] == (told["lost"][reason]["tokens"] if reason == "unpatched" else 0)
    assert warned in " ".join(httpx.get(gateway.url + "/seamark/live").json()["warnings"])


def test_what_the_worker_had_cached_by_itself_is_no_loss(fleet, worker):
    gateway = start_gateway(fleet, worker)
    post(gateway, chat("one"))
    worker.cached = 160
    post(gateway, chat("two"))
    assert judged(gateway, 2)["lost"]["unpatched"]["tokens"] == SYSTEM_END // MATCH_UNIT * MATCH_UNIT - 160


def test_where_answers_do_not_say_what_was_cached_the_workers_own_count_of_hits_does(fleet, worker):
    """vLLM as most run it: no token details, and streams that were not asked for usage."""
    hits = 'vllm:prefix_cache_hits_total{{engine="0",model_name="m"}} {}\n'
    worker.cached, worker.more_metrics = None, hits.format(500.0)  # of before the gateway came
    worker.streams = {CHAT: (EVENTS[0], EVENTS[2])}
    gateway = start_gateway(fleet, worker, flags=("--shadow", "--health-interval", "0.1"))
    for question in ("one", "two", "three"):
        post(gateway, chat(question, stream=question != "two"))
    lost = SYSTEM_END // MATCH_UNIT * MATCH_UNIT
    assert judged(gateway, 3)["lost"]["unpatched"]["tokens"] == 2 * lost
    worker.more_metrics = hits.format(500.0 + 160)
    post(gateway, chat("four", stream=True))
    told = judged(gateway, 4)
    assert told["lost"]["unpatched"]["tokens"] == 3 * lost - 160
    assert (told["requests"], told["cached_not_told"]) == ({"judged": 4}, 4)


def test_no_client_learns_of_anothers_prompts_by_what_its_own_lost(fleet, worker, tmp_path):
    keys = tmp_path / "keys.toml"
    keys.write_text(entry("alice") + entry("bob"))
    gateway = start_gateway(fleet, worker, flags=("--api-keys", str(keys), "--admin-port", str(port := free_port())))
    ids = [post(gateway, chat("one"), headers=bearer(name)).headers["x-request-id"] for name in ("alice", "bob", "bob")]
    admin = f"http://127.0.0.1:{port}/seamark/requests/"
    wait_for(lambda: httpx.get(admin + ids[-1]).json()["lost"] is not None)
    lost = [httpx.get(admin + each).json()["lost"] for each in ids]
    assert lost[:2] == [{}, {}] and lost[2].keys() == {"unpatched"}


def test_a_restart_and_a_changed_prefix_are_losses_that_the_plugin_does_not_cure(fleet, worker):
    gateway = start_gateway(fleet, worker, flags=("--health-interval", "0.1"))
    question = {"role": "user", "content": "How high is the tide tonight? " * 5}
    post(gateway, {"model": "m", "messages": [SYSTEM, question]})
    judged(gateway, 1)
    worker.boot = "1.8e+09"
    wait_for(lambda: httpx.get(gateway.url + "/seamark/status").json()["workers"][0]["boot"].endswith("#1.8e+09"))
    post(gateway, chat("two"))
    changed = {"role": "system", "content": "It is 9:41. " + SYSTEM["content"]}
    post(gateway, {"model": "m", "messages": [changed, question]})
    lost = judged(gateway, 3)["lost"]
    assert lost["worker_restarted"]["tokens"] == SYSTEM_END // MATCH_UNIT * MATCH_UNIT
    assert lost["prefix_changed"]["tokens"] >= SYSTEM_END // MATCH_UNIT * MATCH_UNIT
    assert "unpatched" not in lost


@pytest.mark.parametrize("patched", [False, True])
def test_in_shadow_no_byte_of_a_request_or_an_answer_is_changed(fleet, worker, patched):
    worker.patched = patched
    gateway = start_gateway(fleet, worker, flags=("--shadow",))
    billing = "x-anthropic-billing-header: cc_version=1; cch=0;"
    for stream in (False, True):
        body = chat("Tide?", stream=stream, seed=7)
        body["messages"] = [{"role": "system", "content": billing}, *body["messages"]]
        raw = json.dumps(body, indent=3).encode()
        for _ in range(2):
            answer = post(gateway, raw)
            assert worker.requests[-1].body == raw
            assert "x-seamark-boundary" not in answer.headers
            if stream:
                assert answer.content == worker.answers[-1]
    assert judged(gateway, 4)["requests"] == {"judged": 4}
    assert metric(gateway, "seamark_engine_patched") == patched


def test_a_stream_that_reports_nothing_is_counted_and_not_judged(fleet, worker):
    worker.streams = {CHAT: (EVENTS[0], EVENTS[2])}
    gateway = start_gateway(fleet, worker, flags=("--shadow",))
    post(gateway, chat("Tide?", stream=True))
    assert judged(gateway, 1)["requests"] == {"no_usage": 1}


def test_nothing_is_rendered_before_the_answer_has_come(fleet, worker):
    gateway = start_gateway(fleet, worker)
    worker.hold.set()
    waiting = threading.Thread(target=post, args=(gateway, chat("one")))
    waiting.start()
    wait_for(lambda: worker.requests)
    assert worker.renders == 0
    worker.hold.clear()
    waiting.join()
    judged(gateway, 1)
    assert worker.renders > 0


def test_without_memory_for_texts_nothing_is_judged(fleet, worker):
    gateway = start_gateway(fleet, worker, flags=("--text-bytes", "0"))
    post(gateway, chat("one"))
    assert judged(gateway, 1)["requests"] == {"no_room": 1} and worker.renders == 0


def test_shadow_can_be_told_to_ask_for_usage_all_the_same():
    silent, asking = (Settings(worker=("http://a",), shadow="true", **more) for more in ({}, {"ask_usage": "true"}))
    assert (silent.ask_usage, silent.rewrite, silent.heartbeat) == (False, (), 0.0)
    assert asking.ask_usage and asking.rewrite == ()


def test_a_pace_is_learnt_from_requests_of_which_a_third_had_to_wait():
    pace = CostLearner()
    assert pace.model is None
    for number in range(60):
        tokens = 100 + 97 * (number * 7 % 40)
        waited = 3.0 if number % 3 == 0 else 0.0
        pace.observe(tokens, 0, 0.05 + 0.0002 * tokens + waited, alone=number % 2 == 0)
    line = pace.model
    assert line is not None and line.alone
    assert line.token_seconds == pytest.approx(0.0002, rel=0.1)
    assert line.floor_seconds == pytest.approx(0.05, abs=0.03)


def test_that_later_tokens_cost_more_is_learnt_also_from_prompts_that_were_partly_cached():
    pace = CostLearner()
    draw = random.Random(5)
    for number in range(60):
        prompt, cached = draw.randint(2000, 30_000), 1600 * (number % 2)
        work = TokenWork.between(cached, prompt)
        pace.observe(prompt, cached, 0.1 + 1e-4 * work.at(2.0**-14) + draw.uniform(0, 0.02), alone=True)
    assert pace.model.growth == 2.0**-14
    assert pace.model.seconds(TokenWork.between(0, 20_000)) == pytest.approx(1e-4 * (20_000 + 2e8 * 2.0**-14), rel=0.05)


def test_prompts_of_one_length_tell_no_pace():
    pace = CostLearner()
    for number in range(50):
        pace.observe(1000 + number, 0, 0.2, alone=True)
    assert pace.model is None


def test_the_loss_in_words_says_what_the_plugin_saves_and_what_keeps_requests_unjudged():
    shadow = {
        "watched_seconds": 7200.0,
        "requests": {"judged": 1200, "no_usage": 3},
        "lost": {"unpatched": {"tokens": 90_000, "seconds": 45.0}, "salt": {"tokens": 10, "seconds": 0.0}},
        "tokens_without_seconds": 0,
        "cached_not_told": 7,
        "waiting": 0,
    }
    lines = shadow_lines(shadow)
    assert lines[0] == "lost in 2.0 hours, 1,200 requests judged:"
    assert shadow_lines(shadow | {"watched_seconds": 90.0, "waiting": 5})[0].startswith(
        "lost in 2 minutes, 1,200 requests judged (5 still to be):"
    )
    assert "90,000 tokens" in lines[1] and "the plugin saves these" in lines[1]
    assert "plugin" not in lines[2] and "7 answers" in lines[3] and "not judged: no_usage" in lines[4]
