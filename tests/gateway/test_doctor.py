"""What `seamark doctor` says of workers and gateways under real servers: the verdict, the causes, the exit status."""

from __future__ import annotations

import json
import re
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import pytest
import yaml

from proxy.commands import doctor
from proxy.commands.cures import Cures
from proxy.commands.ways import FoundWay, Way
from tests.harness.api_keys import entry, secret
from tests.harness.drafting_engine import DraftingEngine
from tests.harness.fake_engine import engine_info
from tests.harness.gateways import start_gateway
from tests.harness.recording_worker import RecordingWorker, recording_worker
from tests.harness.threaded_server import serving, whole_body

DRAFTS = "vllm:spec_decode_num_drafts_total 0.0\n"

REFUSED = 'seamark_hints_ignored_total{reason="speculative"} 1.0\n'


class Told(NamedTuple):
    status: int
    verdict: str  # the first line
    text: str


@pytest.fixture
def examined(capsys) -> Callable[..., Told]:
    """`examined(url, *flags)`: what the doctor prints."""

    def examined(url: str, *flags: str) -> Told:
        status = doctor.main(["--worker", url, *flags])
        out, err = capsys.readouterr()
        assert not err
        return Told(status, out.splitlines()[0], out)

    return examined


@pytest.fixture
def key(tmp_path) -> Path:
    path = tmp_path / "key"
    path.write_text("right\n")
    return path


def test_a_patched_worker_will_hit(worker, examined):
    told = examined(worker.url)
    assert told.status == 0 and told.verdict == f"will hit: {worker.url} serves m"
    assert "WRONG" not in told.text and "the cure" not in told.text
    assert "takes tools" in told.text and "--tool-call-parser" not in told.text


@pytest.mark.parametrize("spelt", ["{}", "{}/", "{}/v1", "{}/v1/", "http://{}/v1", "HTTP://{}"])
def test_a_url_is_understood_without_a_scheme_and_with_v1(worker, examined, spelt):
    told = examined(spelt.format(worker.url.removeprefix("http://")))
    assert told.status == 0 and told.verdict.startswith("will hit"), told.text


def test_a_worker_without_the_plugin_cannot_hit_and_the_last_lines_are_the_cure(examined):
    with recording_worker(patched=False, more_metrics='vllm:cache_config_info{block_size="2096"} 1.0\n') as worker:
        told = examined(worker.url, "--runs-as", "pip")
    assert told.status == 1 and told.verdict.startswith("cannot hit: the plugin is not in this vLLM")
    assert "whole blocks of 2,096 tokens" in told.verdict
    install, start = told.text.splitlines()[-2:]
    assert "pip install --no-deps" in install and f"--port {worker.url.rpartition(':')[2]}" in start


def test_prefix_caching_that_is_off_is_the_cause_although_the_plugin_is_there(worker, examined):
    worker.more_metrics = 'vllm:cache_config_info{block_size="384",enable_prefix_caching="False"} 1.0\n'
    told = examined(worker.url)
    assert told.status == 1 and told.verdict == "cannot hit: prefix caching is off in this vLLM"
    assert "--enable-prefix-caching" in told.text
    worker.more_metrics = worker.more_metrics.replace("False", "True")
    assert examined(worker.url).status == 0


def test_drafts_beside_which_hints_were_refused_are_the_cause(worker, examined):
    worker.more_metrics = DRAFTS + REFUSED
    told = examined(worker.url, "--runs-as", "docker")
    assert told.status == 1 and told.verdict.startswith("cannot hit: speculative decoding is on")
    assert "SEAMARK_DRAFTS=1" in told.verdict and "docker run -e SEAMARK_DRAFTS=1" in told.text


@pytest.mark.parametrize(
    ("cause", "cured"),
    [("drafts: hints beside mtp need SEAMARK_DRAFTS=1", True), ("a layer has a sliding window", False)],
)
def test_what_the_plugin_says_of_refused_hints_is_the_cause_and_the_cure_is_one_that_helps(examined, cause, cured):
    unit = 'vllm:cache_config_info{block_size="528",mamba_block_size="528"} 1.0\n'
    with recording_worker(refused=cause, more_metrics=DRAFTS + unit) as worker:
        told = examined(worker.url, "--runs-as", "docker")
        assert not any(b"seamark_boundaries" in request.body for request in worker.requests)  # it need not be asked
    assert told.status == 1 and told.verdict == f"cannot hit: {cause}"
    assert ("docker run -e SEAMARK_DRAFTS=1" in told.text) == cured and "--prefix-match-unit" not in told.text


@pytest.mark.parametrize(
    ("state", "fine", "words"),
    [
        ("trial", False, ("hints are on trial", "a gateway before it, or `seamark worker` alone")),
        ("closed", False, ("did not stand their trial", "seamark/self-check/reset", "drafts: worse")),
        ("open", True, ("which stood their trial",)),
        ("on", True, ("speculative decoding is on, with hints",)),
    ],
)
def test_how_hints_beside_drafts_stand_is_said_with_what_helps(examined, state, fine, words):
    gate = DraftingEngine(state=state, why="worse")
    with recording_worker(drafting=gate, ahead=1, more_metrics=DRAFTS) as worker:
        told = examined(worker.url)
    assert told.status == (0 if fine else 1), told.text
    assert all(each in told.text for each in words), told.text
    assert told.verdict.startswith("cannot hit" if state == "closed" else "will hit")


@pytest.mark.parametrize(("recurrent_block", "advised"), [("None", False), ("528", True)])
def test_a_finer_unit_is_no_advice_for_a_worker_without_recurrent_layers(worker, examined, recurrent_block, advised):
    worker.patched = False
    worker.more_metrics = engine_info().replace('match_unit="16"', 'match_unit="128"')
    worker.more_metrics += f'vllm:cache_config_info{{block_size="128",mamba_block_size="{recurrent_block}"}} 1.0\n'
    told = examined(worker.url)
    assert told.verdict.startswith("will hit") and told.status == advised
    assert ("--prefix-match-unit 16" in told.text) == advised


class RefusesHints(RecordingWorker):
    """It counts a hint as refused once one has come."""

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        hinted = any(b"seamark_boundaries" in request.body for request in self.requests)
        self.more_metrics = DRAFTS + (REFUSED if hinted else "")
        await super().__call__(scope, receive, send)


def test_drafts_that_nobody_sent_a_hint_yet_are_asked_with_one(examined):
    worker = RefusesHints()
    with serving(worker) as url:
        told = examined(url)
    assert told.verdict.startswith("cannot hit: speculative decoding is on")
    assert sum(b"seamark_boundaries" in request.body for request in worker.requests) == 1
    assert all(json.loads(request.body)["max_tokens"] == 1 for request in worker.requests)


@pytest.mark.parametrize(("ahead", "hints"), [(16, 0), (0, 1)])
def test_drafts_beside_which_hints_are_used_are_no_cause(examined, ahead, hints):
    with recording_worker(ahead=ahead, more_metrics=DRAFTS) as worker:
        told = examined(worker.url)
        assert told.status == 0 and told.verdict.startswith("will hit")
        assert "ok    speculative decoding is on, with hints" in told.text
        assert sum(b"seamark_boundaries" in request.body for request in worker.requests) == hints


# What vLLM 0.32 answers without the flags.
NO_PARSER = b'{"error":{"message":"\\"auto\\" tool choice requires --enable-auto-tool-choice and --tool-call-parser to '
NO_PARSER += b'be set","type":"BadRequestError","param":null,"code":400}}'


@pytest.mark.parametrize(
    ("model", "parser"),
    [
        ("nvidia/Qwen3-Next-80B-A3B", "hermes"),
        ("zai-org/GLM-5.3-Flash", "glm47"),
        ("NVIDIA-Nemotron-3-Nano", "qwen3_xml"),
        ("mine", "NAME"),
    ],
)
def test_an_agents_first_refusal_is_foreseen(examined, model, parser):
    worker = RecordingWorker(models=(model,))

    async def app(scope: Any, receive: Any, send: Any) -> None:
        if scope["path"] != "/v1/chat/completions":
            return await worker(scope, receive, send)
        body = json.loads(await whole_body(receive))
        assert body["max_tokens"] == 1 and body["tool_choice"] == "auto" and len(body["tools"]) == 1
        await send({"type": "http.response.start", "status": 400, "headers": []})
        return await send({"type": "http.response.body", "body": NO_PARSER})

    with serving(app) as url:
        told = examined(url)
    assert told.status == 0 and told.verdict.startswith("will hit")
    assert "takes no tools" in told.text and f"--enable-auto-tool-choice --tool-call-parser {parser} " in told.text


def test_drafts_without_the_plugin_are_named_beside_it(examined):
    with recording_worker(patched=False, more_metrics=DRAFTS) as worker:
        told = examined(worker.url)
    assert told.verdict.startswith("cannot hit: the plugin") and "the plugin tries hints beside it" in told.text


def beside(connector: str, lane: str) -> str:
    """The line of a plugin beside a KV connector."""
    return engine_info().replace("{", f'{{connector="{connector}",lane="{lane}",')


@pytest.mark.parametrize(
    ("lane", "said"),
    [
        ("inside_pass", "inside a pass, as without one"),
        ("chunk_ends", "each state costs a pass"),
        ("not_served", "vLLM cannot serve hybrid models through it"),
        ("of_a_later_plugin", "of_a_later_plugin"),
    ],
)
def test_a_connector_is_named_with_what_it_changes(worker, examined, lane, said):
    worker.patched, worker.more_metrics = False, beside("NixlConnector+Mine", lane)
    told = examined(worker.url)
    assert told.status == 0 and told.verdict.startswith("will hit")
    assert re.search(rf"ok    KV connector NixlConnector\+Mine: .*{said}", told.text)


def test_a_connector_beside_which_hints_are_refused_is_the_cause(worker, examined):
    worker.patched, worker.more_metrics = False, beside("DecodeBenchConnector", "no_hints")
    told = examined(worker.url)
    assert told.status == 1 and told.verdict.startswith("cannot hit: KV connector DecodeBenchConnector puts values")
    assert "WRONG KV connector DecodeBenchConnector: hints are refused" in told.text
    assert "--kv-transfer-config" in told.text


def test_a_worker_that_computes_nothing_cannot_hit(worker, examined):
    worker.status = 500
    told = examined(worker.url)
    assert told.status == 1 and told.verdict == (
        "cannot hit: it does not answer a completion of one token (status 500)"
    )


def test_a_missing_feed_costs_reasons_and_no_hit(worker, examined):
    worker.has_feed = False
    told = examined(worker.url)
    assert told.status == 1 and told.verdict.startswith("will hit") and "1 to change" in told.verdict
    assert "--middleware engine_patches.reporting.events_api.EventsEndpoint" in told.text


def test_a_frontend_in_rust_is_named_with_what_it_lacks_and_its_counter_of_drafts_is_none(worker, examined):
    """Its reports are read at a port of their own."""
    with recording_worker(sources={}) as rust:
        port = urlsplit(worker.url).port
        rust.patched, rust.boot = False, ""
        rust.more_metrics = "vllm:spec_decode_num_drafts_total 0.0\n"
        rust.sources = {"0": {"publisher": "null", "endpoint": f"tcp://127.0.0.1:{port}", "topic": "seamark"}}
        rust.lacks = ("/v1/messages", "/v1/responses", "/v1/chat/completions/render")
        told = examined(rust.url)
        assert told.status == 0 and told.verdict.startswith("will hit")
        assert "vLLM's Rust frontend serves: it lacks /v1/messages, /v1/responses" in told.text
        assert "the engine's decisions are reported" in told.text and "speculative" not in told.text
        assert "render" not in told.text
        rust.has_feed, worker.patched = False, False
        told = examined(rust.url)
        assert told.status == 1 and "reports cannot be read" in told.text and f":{port} does not give them" in told.text


def test_an_older_plugin_is_to_be_updated(worker, examined):
    worker.version = "0.2.0"
    told = examined(worker.url, "--runs-as", "compose")
    assert told.status == 1 and "older than 0.3" in told.text
    assert "docker compose up --build -d SERVICE   # with Seamark 0.3 or later" in told.text


def test_a_wrong_key_is_told_from_none(worker, examined, key):
    worker.api_key = "right"
    none = examined(worker.url)
    assert none.status == 1 and none.verdict.startswith("not reachable: ")
    assert "wants an API key" in none.verdict and "--worker-api-key-file" in none.verdict
    assert examined(worker.url, "--worker-api-key-file", str(key)).status == 0
    key.write_text("wrong")
    wrong = examined(worker.url, "--worker-api-key-file", str(key))
    assert wrong.status == 1 and "refuses the key" in wrong.verdict and "wants an API key" not in wrong.text
    assert "wrong" not in wrong.text.replace("WRONG", "")


@contextmanager
def mute() -> Iterator[str]:
    """The URL of a server that takes connections, and closes each with a line that is no HTTP."""
    listening = socket.create_server(("127.0.0.1", 0))

    def answer() -> None:
        while True:
            try:
                connection, _ = listening.accept()
            except OSError:
                return
            with connection:
                connection.recv(4096)
                connection.sendall(b"\x15\x03\x01 this is no HTTP\r\n\r\n")

    thread = threading.Thread(target=answer, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
    finally:
        listening.shutdown(socket.SHUT_RDWR)
        listening.close()
        thread.join()


@pytest.mark.parametrize(
    ("url", "cause"),
    [
        ("127.0.0.1:9", "connection refused"),
        ("http://127.0.0.1:9/v1", "connection refused"),
        ("http://nowhere.invalid:8000", "host name is not known"),
        ("127.0.0.1", "the URL has no port"),
        ("ftp://127.0.0.1:8000", "no URL of http"),
        ("http://[", "http://[ is no URL"),
    ],
)
def test_a_worker_that_is_not_there_is_not_reachable_for_a_cause(examined, url, cause):
    if cause == "the URL has no port":
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", 80)) == 0:
                pytest.skip("something listens on port 80 here")
    told = examined(url)
    assert told.status == 1 and told.verdict.startswith("not reachable: ") and cause in told.verdict


def test_what_speaks_no_http_or_no_tls_is_told(worker, examined):
    with mute() as url:
        assert "does not speak HTTP" in examined(url).verdict
    assert "TLS fails" in examined(worker.url.replace("http:", "https:")).verdict


def test_what_is_no_vllm_is_not_reachable(examined):
    async def other(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"[]"})

    with serving(other) as url:
        told = examined(url)
    assert told.status == 1 and told.verdict.startswith("not reachable: ") and "is not vLLM" in told.verdict


def test_a_password_in_a_url_is_not_shown(worker, examined):
    for url in (worker.url, "http://127.0.0.1:9", "http://["):
        assert "sesame" not in examined(url.replace("http://", "http://ann:sesame@")).text


def test_a_gateway_is_no_worker_and_names_those_it_has(fleet, worker, examined):
    gateway = start_gateway(fleet, worker)
    told = examined(gateway.url)
    assert told.status == 1 and told.verdict == f"a gateway, not a worker: {gateway.url}"
    assert f"--worker {worker.url}" in told.text


def test_a_gateway_with_keys_is_known_without_one(fleet, worker, examined, tmp_path):
    keys, key = tmp_path / "keys.toml", tmp_path / "admin"
    keys.write_text(entry("ann", admin=True))
    key.write_text(secret("ann"))
    gateway = start_gateway(fleet, worker, flags=("--api-keys", str(keys)))
    assert examined(gateway.url).verdict == f"a gateway, not a worker: {gateway.url}"
    none = examined(worker.url, "--gateway", gateway.url)
    assert none.status == 1 and none.verdict.startswith("not reachable: the gateway")
    assert "wants an API key" in none.verdict and "--gateway-key-file" in none.verdict
    asked = examined(worker.url, "--gateway", gateway.url, "--gateway-key-file", str(key))
    assert asked.status == 0 and re.search(r"lost in \d+ minutes", asked.text)
    key.write_text("wrong")
    wrong = examined(worker.url, "--gateway", gateway.url, "--gateway-key-file", str(key))
    assert wrong.status == 1 and "refuses the key" in wrong.verdict


def test_a_gateway_that_is_away_fails_for_a_cause(worker, examined):
    told = examined(worker.url, "--gateway", "127.0.0.1:9")
    assert told.status == 1 and told.verdict == (
        "not reachable: no gateway answers at http://127.0.0.1:9: connection refused: nothing listens there, or not yet"
    )
    assert "ok    patches are live" in told.text


def test_a_gateway_that_is_none_fails_and_what_is_wrong_with_the_worker_stays_the_verdict(worker, examined):
    worker.status = 404
    told = examined(worker.url, "--gateway", worker.url)
    assert told.status == 1 and told.verdict.startswith("cannot hit: ") and "does not show /seamark/status" in told.text


@pytest.mark.parametrize("flags", [("--runs-as", "lxc"), ("--worker-api-key-file", "/nowhere"), ("--works", "x")])
def test_a_wrong_command_line_or_key_file_exits_with_2(examined, flags):
    with pytest.raises(SystemExit) as ended:
        examined("http://127.0.0.1:9", *flags)
    assert ended.value.code == 2


@pytest.mark.parametrize("way", list(Way))
def test_each_way_has_cures_of_its_own_for_all_that_can_be_wrong(examined, way):
    def cures(**state: Any) -> str:
        with recording_worker(**state) as worker:
            text = examined(worker.url, "--runs-as", way).text
        return re.sub(r"127.0.0.1:\d+", "", text)

    plugin = cures(patched=False)
    assert "SEAMARK_DRAFTS" in cures(more_metrics=DRAFTS + REFUSED)  # of a plugin that knows no trial
    assert f"(cures for {way})" in plugin
    marks = {
        Way.PIP: ("pip install", "then start it with"),
        Way.SYSTEMD: ("systemctl edit", "systemctl restart"),
        Way.DOCKER: ("docker build -f", "docker run"),
        Way.COMPOSE: ("build: {context:", "docker compose up --build"),
        Way.SPARK: ("make-mod.sh", "mods: [mods/seamark]", "--enable-prompt-tokens-details"),
        Way.KUBERNETES: ("docker push", 'args: ["m", "--host", "0.0.0.0"', "kubectl apply"),
    }
    assert all(mark in plugin for mark in marks[way])
    assert not any(mark in plugin for other in Way if other != way for mark in marks[other][1:2])
    assert "--middleware" in cures(has_feed=False)
    assert "0.3 or later" in cures(version="0.2.0")


def test_a_container_or_another_machine_needs_an_open_host(worker, examined):
    worker.patched = False
    assert "--host" not in examined(worker.url, "--runs-as", "pip").text
    assert "--host 0.0.0.0" in examined(worker.url, "--runs-as", "docker").text
    elsewhere = Cures(FoundWay(Way.PIP), "m", 8000, local=False)
    assert "--host 0.0.0.0 --port 8000" in elsewhere.install()


def test_yaml_of_the_cures_is_yaml():
    """What goes into a file, without the commands and the notes beside it."""
    compose = Cures(FoundWay(Way.COMPOSE, "llm"), "org/m", 8000, local=True)
    lines = [line for line in compose.install().splitlines() if not line.strip().startswith(("docker", "#"))]
    service = yaml.safe_load("\n".join(lines))["services"]["llm"]
    assert service["command"] == "org/m --host 0.0.0.0 --port 8000 FLAGS"
    assert service["build"]["dockerfile"] == "deploy/worker.Dockerfile"
    pod = Cures(FoundWay(Way.KUBERNETES), "org/m", 8000, local=True)
    lines = [line for line in pod.install().splitlines() if not line.strip().startswith(("docker", "#"))]
    container = yaml.safe_load("\n".join(lines).replace(", ...", ""))
    assert " ".join(container["args"]) == "org/m --host 0.0.0.0 --port 8000"
    assert yaml.safe_load(pod.drafts())["env"] == [{"name": "SEAMARK_DRAFTS", "value": "1"}]


def test_an_engine_core_without_the_patches_is_noticed_although_the_server_has_them(examined):
    """The engine's line goes once a step has shown that the engine core runs without the patches."""
    worker = RecordingWorker(patched=False)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        worker.more_metrics = "" if worker.requests else engine_info()
        await worker(scope, receive, send)

    with serving(app) as url:
        assert examined(url).verdict.startswith("cannot hit: the plugin")
