"""A gateway beside one worker: its metrics with ours, ready when it is, and what may not stand beside it."""

from __future__ import annotations

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from proxy.settings import Settings
from tests.harness.gateways import CHAT, SYSTEM_END, chat, own_gateway
from tests.harness.recording_worker import recording_worker
from tests.harness.waiting import wait_for

VLLM = """# HELP vllm:num_requests_waiting Number of requests waiting.
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{engine="0",model_name="m"} 3.0
# HELP seamark_seconds_saved_total Prefill not computed
# TYPE seamark_seconds_saved_total counter
seamark_seconds_saved_total 2.0
"""


@pytest.fixture
def worker():
    with recording_worker(more_metrics=VLLM) as started:
        yield started


def values(url: str) -> dict[str, float]:
    text = httpx.get(url + "/metrics").text
    types = [line.split()[2] for line in text.splitlines() if line.startswith("# TYPE")]
    assert len(types) == len(set(types))  # which a strict reader wants
    return {
        sample.name: sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if "worker" not in sample.labels
    }


def test_a_picker_finds_the_workers_figures_beside_ours(worker):
    with own_gateway(worker, sidecar=True) as own:
        wait_for(lambda: own.gateway.pool.up)
        httpx.post(own.url + CHAT, json=chat("Tide?"))
        shown = values(own.url)
        assert shown["vllm:num_requests_waiting"] == 3 and shown["seamark_seconds_saved_total"] == 2
        assert "seamark_queued" in shown
        assert httpx.get(own.url + "/ready").status_code == 200


def test_without_the_worker_it_is_not_ready_and_shows_its_own(worker):
    with own_gateway(worker, sidecar=True) as own:
        wait_for(lambda: own.gateway.pool.up)
        worker.api_key = "sk"
        wait_for(lambda: not own.gateway.pool.up)
        assert httpx.get(own.url + "/ready").status_code == 503
        assert httpx.get(own.url + "/health").status_code == 200
    with recording_worker() as gone:
        pass
    with own_gateway(gone, sidecar=True) as own:
        shown = values(own.url)
        assert "seamark_queued" in shown and "vllm:num_requests_waiting" not in shown


def test_elsewhere_the_page_shows_the_gateways_alone(worker):
    with own_gateway(worker) as own:
        wait_for(lambda: own.gateway.pool.up)
        assert "vllm:num_requests_waiting" not in values(own.url)


def test_hints_and_reasons_are_as_ever(worker):
    with own_gateway(worker, sidecar=True) as own:
        wait_for(lambda: own.gateway.pool.up)
        answers = [httpx.post(own.url + CHAT, json=chat(question)) for question in ("Tide?", "Ebb?")]
        assert all("x-seamark-boundary" in answer.headers for answer in answers)
        assert int(answers[1].headers["x-seamark-predicted"]) // 16 == SYSTEM_END // 16


@pytest.mark.parametrize("sidecar", [False, True])
def test_the_hint_header_of_a_client_goes_no_further(worker, sidecar):
    with own_gateway(worker, sidecar=sidecar) as own:
        wait_for(lambda: own.gateway.pool.up)
        for path in (CHAT, "/v1/other"):
            httpx.post(own.url + path, json=chat("Tide?"), headers={"x-seamark-boundaries": "163"})
            assert b"x-seamark-boundaries" not in dict(worker.requests[-1].headers)


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"worker": ("http://a:1", "http://b:1")}, "--worker"),
        ({"worker": ()}, "--worker"),
        ({"redis": "redis://a"}, "leave out redis"),
        ({"workers_file": "/workers.toml"}, "leave out workers_file"),
    ],
)
def test_what_does_not_go_with_it_is_named(more, words):
    with pytest.raises(ValueError, match="sidecar: it") as error:
        Settings(**{"worker": ("http://a:1",), "sidecar": True, **more})
    assert words in str(error.value)
