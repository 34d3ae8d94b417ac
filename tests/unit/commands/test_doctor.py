"""What `seamark doctor` says of what workers and gateways answer: the verdict, the causes, the exit status.

What sockets and processes show beyond that: `tests/gateway/test_doctor.py`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from proxy.commands import doctor
from proxy.commands.doctor import STATUS, shadow_lines
from proxy.fleet.sleep import IS_SLEEPING
from proxy.http.client import Broken, Silent, Unreachable
from proxy.version import version
from tests.harness.drafting_engine import DraftingEngine
from tests.harness.fake_engine import engine_info
from tests.harness.reachable import Reachable
from tests.harness.recording_worker import RecordingWorker, respond
from tests.harness.threaded_server import whole_body

URL = "http://127.0.0.1:8000"

GATEWAY = "http://127.0.0.1:8080"

DRAFTS = "vllm:spec_decode_num_drafts_total 0.0\n"

REFUSED = 'seamark_hints_ignored_total{reason="speculative"} 1.0\n'

CONFIG = 'vllm:cache_config_info{block_size="%d",enable_prefix_caching="%s",mamba_block_size="%s"} 1.0\n'


class Told(NamedTuple):
    status: int
    verdict: str  # the first line
    text: str

    def line(self, words: str) -> str:
        """The one that has these words."""
        (line,) = [each for each in self.text.splitlines() if words in each]
        return line


class App:
    """A server with pages, for whatever is no `RecordingWorker`."""

    def __init__(self, pages: Mapping[str, tuple[int, bytes]]) -> None:
        """`pages`: status and body by path."""
        self.pages = pages
        self.asked: list[str] = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.asked.append(scope["path"])
        status, body = self.pages.get(scope["path"], (404, b"[]"))
        await respond(send, body, status=status)


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine counts what it refuses before it answers, and nothing shows how vLLM is run."""
    monkeypatch.setattr(doctor, "REPORT_SECONDS", 0.0)
    monkeypatch.setattr(doctor, "find", lambda url, around: None)


@pytest.fixture
def worker(reachable: Reachable) -> RecordingWorker:
    made = RecordingWorker(url=URL)
    reachable.add(made)
    return made


@pytest.fixture
def examined(capsys: pytest.CaptureFixture[str], reachable: Reachable) -> Callable[..., Told]:
    """`examined(*flags, url=URL)`: what the doctor prints."""

    def examined(*flags: str, url: str = URL) -> Told:
        status = doctor.main(["--worker", url, *flags])
        out, err = capsys.readouterr()
        assert not err and reachable.unclosed == 0
        return Told(status, out.splitlines()[0], out)

    return examined


@pytest.fixture
def key(tmp_path: Path) -> Path:
    path = tmp_path / "key"
    path.write_text("right\n")
    return path


def test_prefix_caching_that_is_off_is_the_cause_although_the_plugin_is_there(worker, examined):
    worker.more_metrics = CONFIG % (384, "False", 16)
    told = examined()
    assert told.status == 1 and told.verdict == "cannot hit: prefix caching is off in this vLLM"
    assert "    --enable-prefix-caching   # " in told.text and "no --no-enable-prefix-caching" in told.text
    assert told.text.index("WRONG prefix caching") < told.text.index("--enable-prefix-caching   #")
    for fine in ("True", "x"):
        worker.more_metrics = CONFIG % (384, fine, 16)
        assert examined().status == 0


@pytest.mark.parametrize(
    ("cause", "cured"),
    [("drafts: hints beside mtp need SEAMARK_DRAFTS=1", True), ("a layer has a sliding window", False)],
)
def test_what_the_plugin_says_of_refused_hints_is_the_cause_and_the_cure_is_one_that_helps(
    worker, examined, cause, cured
):
    worker.refused, worker.more_metrics = cause, DRAFTS + CONFIG % (528, "True", 528)
    told = examined("--runs-as", "docker")
    assert not any(b"seamark_boundaries" in request.body for request in worker.requests)  # it need not be asked
    assert told.status == 1 and told.verdict == f"cannot hit: {cause}"
    assert told.line(f"WRONG no hint counts: {cause}") and told.line("WRONG speculative decoding is on, without hints")
    assert told.line("ok    cache block 384")
    assert ("docker run -e SEAMARK_DRAFTS=1" in told.text) == cured and "--prefix-match-unit" not in told.text


@pytest.mark.parametrize(
    ("state", "verdict", "fine", "words"),
    [
        ("trial", "will hit", False, ("hints are on trial", "a gateway before it, or `seamark worker` alone")),
        ("closed", "cannot hit", False, ("did not stand their trial", "seamark/self-check/reset", "drafts: worse")),
        ("open", "will hit", True, ("with hints, which stood their trial: they share 1 tokens past a state",)),
        ("on", "will hit", True, ("speculative decoding is on, with hints: they share 1 tokens past a state",)),
    ],
)
def test_how_hints_beside_drafts_stand_is_said_with_what_helps(worker, examined, state, verdict, fine, words):
    worker.drafting, worker.ahead = DraftingEngine(state=state, why="worse"), 1
    worker.more_metrics = DRAFTS
    told = examined()
    assert told.status == (0 if fine else 1), told.text
    assert all(each in told.text for each in words), told.text
    assert told.verdict.startswith(verdict)


@pytest.mark.parametrize(
    ("unit", "block", "advised"),
    [(16, 528, False), (64, 528, False), (65, 528, True), (384, 528, True), (384, None, False)],
)
def test_a_match_unit_is_called_coarse_past_that_of_a_delta_net_where_a_layer_is_recurrent(
    worker, examined, unit, block, advised
):
    worker.patched = False
    worker.more_metrics = engine_info().replace('match_unit="16"', f'match_unit="{unit}"') + CONFIG % (
        384,
        "True",
        block,
    )
    told = examined()
    assert told.verdict.startswith("will hit") and told.status == advised
    assert told.verdict.endswith("; 1 to change, see WRONG below" if advised else " serves m")
    line = told.line(f"match unit {unit} tokens")
    assert line.startswith("WRONG" if advised else "ok   ") and ("--prefix-match-unit 16" in told.text) == advised
    assert line.endswith("since no layer is recurrent") == (block is None)


class RefusesHints(RecordingWorker):
    """It counts a hint as refused once one has come, and its metrics were read so many times more."""

    late = 0

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        hinted = any(b"seamark_boundaries" in request.body for request in self.requests)
        self.late -= hinted and scope["path"] == "/metrics"
        self.more_metrics = DRAFTS + (REFUSED if hinted and self.late < 0 else "")
        await super().__call__(scope, receive, send)


@pytest.mark.parametrize("late", [0, 2])
def test_drafts_that_nobody_sent_a_hint_yet_are_asked_with_one(examined, reachable, monkeypatch, late):
    monkeypatch.setattr(doctor, "REPORT_SECONDS", 300.0)
    worker = RefusesHints()
    worker.late = late
    reachable.add(worker)
    told = examined()
    assert told.verdict.startswith("cannot hit: speculative decoding is on")
    (hinted,) = [request for request in worker.requests if b"seamark_boundaries" in request.body]
    assert hinted.path == "/v1/completions" and hinted.fields["vllm_xargs"] == {"seamark_boundaries": [1]}
    assert all(json.loads(request.body)["max_tokens"] == 1 for request in worker.requests)


def test_drafts_beside_which_hints_were_refused_are_the_cause(worker, examined):
    worker.more_metrics = DRAFTS + REFUSED
    told = examined("--runs-as", "docker")
    assert told.status == 1 and told.verdict.startswith("cannot hit: speculative decoding is on")
    assert "SEAMARK_DRAFTS=1" in told.verdict and "docker run -e SEAMARK_DRAFTS=1" in told.text
    assert not any(b"seamark_boundaries" in request.body for request in worker.requests)


@pytest.mark.parametrize(("ahead", "hints"), [(16, 0), (0, 1)])
def test_drafts_beside_which_hints_are_used_are_no_cause(worker, examined, ahead, hints):
    worker.ahead, worker.more_metrics = ahead, DRAFTS
    told = examined()
    assert told.status == 0 and told.verdict.startswith("will hit")
    assert told.line("ok    speculative decoding is on, with hints")
    assert sum(b"seamark_boundaries" in request.body for request in worker.requests) == hints


def test_drafts_without_the_plugin_are_named_beside_it(worker, examined):
    worker.patched, worker.more_metrics = False, DRAFTS
    told = examined()
    assert told.verdict.startswith("cannot hit: the plugin")
    assert told.line("ok    speculative decoding is on: the plugin tries hints beside it")


# What vLLM 0.32 answers without the flags.
NO_PARSER = b'{"error":{"message":"\\"auto\\" tool choice requires --enable-auto-tool-choice and --tool-call-parser to '
NO_PARSER += b'be set","type":"BadRequestError","param":null,"code":400}}'


class RefusesTools(RecordingWorker):
    """It answers chats with a status and a body."""

    answer = (400, NO_PARSER)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["path"] != "/v1/chat/completions":
            return await super().__call__(scope, receive, send)
        body = json.loads(await whole_body(receive))
        assert body["max_tokens"] == 1 and body["tool_choice"] == "auto" and len(body["tools"]) == 1
        status, text = self.answer
        return await respond(send, text, status=status)


def test_an_agents_first_refusal_is_foreseen_and_costs_no_hit(examined, reachable):
    reachable.add(RefusesTools(models=("zai-org/GLM-5.3-Flash",)))
    told = examined()
    assert told.status == 0 and told.verdict.endswith("serves zai-org/GLM-5.3-Flash")
    assert told.line("ok    takes no tools: agents will get 400")
    assert "--enable-auto-tool-choice --tool-call-parser glm47 " in told.text and "(cures for pip" in told.text


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
    told = examined()
    assert told.status == 0 and told.verdict.startswith("will hit")
    assert re.search(rf"ok    KV connector NixlConnector\+Mine: .*{said}", told.text)


def test_a_connector_beside_which_hints_are_refused_is_the_cause(worker, examined):
    worker.patched, worker.more_metrics = False, beside("DecodeBenchConnector", "no_hints")
    told = examined()
    assert told.status == 1 and told.verdict.startswith("cannot hit: KV connector DecodeBenchConnector puts values")
    assert told.line("WRONG KV connector DecodeBenchConnector: hints are refused")
    assert "--kv-transfer-config" in told.text


def test_a_worker_that_answers_no_completion_as_vllm_does_cannot_hit(examined, reachable):
    class Odd(RecordingWorker):
        async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
            if scope["path"] == "/v1/completions":
                return await respond(send, b"[]")
            return await super().__call__(scope, receive, send)

    reachable.add(Odd())
    assert "of one token (status 200)" in examined().verdict


def test_a_frontend_in_rust_is_named_with_what_it_lacks_and_its_counter_of_drafts_is_none(worker, examined, reachable):
    """Its reports are read at a port of their own."""
    rust = RecordingWorker(patched=False, boot="", more_metrics=DRAFTS)
    rust.sources = {"0": {"publisher": "null", "endpoint": "tcp://127.0.0.1:8000", "topic": "seamark"}}
    rust.lacks = ("/v1/messages", "/v1/responses", "/v1/chat/completions/render")
    url = reachable.add(rust, "http://127.0.0.1:9000")
    told = examined(url=url)
    assert told.status == 0 and told.verdict.startswith("will hit")
    assert told.line("ok    vLLM's Rust frontend serves: it lacks /v1/messages, /v1/responses and answers with one")
    assert told.line("ok    the engine's decisions are reported") and "speculative" not in told.text
    assert "render" not in told.text
    rust.lacks = ("/v1/chat/completions/render",)
    assert examined(url=url).line("vLLM's Rust frontend serves; a hint in a header does not reach the engine")
    rust.has_feed, worker.patched = False, False
    told = examined(url=url)
    assert told.status == 1 and told.verdict.startswith("cannot hit: ")
    assert told.line("WRONG the engine's reports cannot be read") and ":8000 does not give them" in told.verdict


def test_reports_that_the_server_itself_gives_are_enough(examined, reachable):
    class Server(RecordingWorker):
        async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
            if scope["path"] == "/seamark/metrics":
                return await respond(send, b"", status=404)
            return await super().__call__(scope, receive, send)

    server = Server(reports="127.0.0.1:1")  # nothing listens there
    reachable.add(server)
    told = examined()
    assert told.status == 0 and told.line("ok    the engine's decisions are reported")
    server.has_feed = False
    told = examined()
    assert told.verdict == "cannot hit: http://127.0.0.1:1 does not give them"
    assert told.line("WRONG the engine's reports cannot be read: http://127.0.0.1:1")


def test_a_plugin_of_another_release_is_to_be_updated(worker, examined):
    worker.version = "0.2.0"
    told = examined("--runs-as", "compose")
    assert told.status == 1 and told.verdict.startswith("cannot hit: its plugin is Seamark 0.2.0, this gateway ")
    assert told.line("WRONG no hint counts: its plugin is Seamark 0.2.0") and "update the plugin" in told.text
    assert f"docker compose up --build -d SERVICE   # with Seamark {version()} or later" in told.text


@pytest.mark.parametrize(
    ("status", "said"),
    [(403, "wants an API key (status 403)"), (500, "is not well: /v1/models answers 500"), (404, "is not vLLM")],
)
def test_a_server_that_lists_no_models_is_not_reachable(examined, reachable, status, said):
    app = App({"/v1/models": (status, b"{}"), "/health": (200, b"")})
    reachable.add(app)
    told = examined()
    assert told.status == 1 and told.verdict.startswith("not reachable: ") and said in told.verdict
    assert app.asked == ["/health", "/v1/models"]
    app.pages = {"/v1/models": (200, b'{"data":[]}')}
    assert "is not vLLM: /v1/models lists no models (status 200)" in examined().verdict


def test_metrics_that_cannot_be_read_are_not_vllms(worker, examined):
    worker.more_metrics = "vllm:num_requests_running NaN\n"
    told = examined()
    assert told.status == 1 and told.verdict == f"not reachable: {URL} is not vLLM: its /metrics cannot be read"


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("http://127.0.0.1:9", "no server answers at http://127.0.0.1:9: connection refused"),
        ("http://spark", "connection refused (the URL has no port; vLLM's is 8000)"),
        ("ftp://127.0.0.1:8000", "no server answers at ftp://127.0.0.1:8000: no URL of http:// or https://"),
        ("http://", "no URL of http:// or https://"),
        ("http://[", "http://[ is no URL"),
        ("http://a:x", "http://a:x is no URL"),
        ("http://ann:sesame@[", "that is no URL"),
    ],
)
def test_a_worker_that_is_not_there_is_not_reachable_for_a_cause(examined, url, said):
    told = examined(url=url)
    assert told.status == 1 and told.verdict.startswith("not reachable: ") and told.verdict.endswith(said)
    assert "sesame" not in told.text


def timed_out() -> Unreachable:
    error = Unreachable("no connection within 2 s")
    error.__cause__ = TimeoutError()
    return error


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (timed_out(), "no connection within 2 s: another address, or a firewall between"),
        (Silent(""), "it takes the connection and says nothing for 10 s"),
        (Broken("x"), "what answers there does not speak HTTP: https:// instead of http://?"),
        (Unreachable("no route"), "no route"),
    ],
)
def test_why_nothing_answers_is_said_with_what_a_person_can_try(examined, reachable, fault, said):
    reachable.faults[URL] = fault
    assert examined().verdict == f"not reachable: no server answers at {URL}: {said}"


def test_one_that_sleeps_cannot_hit_and_is_not_asked_for_anything(worker, examined):
    worker.sleeps = (1,)
    told = examined()
    assert told.status == 1 and told.verdict == f"cannot hit: {URL} is asleep (level 1): POST /wake_up wakes it"
    assert told.line(f"WRONG {URL} is asleep") and not worker.requests and IS_SLEEPING not in told.text


def test_a_gateway_is_no_worker_and_names_those_it_has(examined, reachable):
    workers = {"workers": [{"url": "http://ann:sesame@a:1"}, {"url": "http://b:1"}]}
    app = App({"/health": (200, b'{"gateway":"g"}'), STATUS: (200, json.dumps(workers).encode())})
    reachable.add(app)
    told = examined()
    assert told.status == 1 and told.verdict == f"a gateway, not a worker: {URL}"
    assert told.line(f"WRONG {URL} is a Seamark gateway; ask --worker http://a:1, --worker http://b:1")
    for status in (b'{"workers":[]}', b"{}", b'{"workers":[1]}', b"no JSON"):
        app.pages = {**app.pages, STATUS: (200, status)}
        assert examined().line("is a Seamark gateway; ask the vLLM behind it, with --worker")


SHADOW: Mapping[str, Any] = {
    "watched_seconds": 7200.0,
    "requests": {"judged": 12345, "no_usage": 2, "no_room": 1, "other": 1000},
    "waiting": 1200,
    "lost": {
        "salted": {"tokens": 5, "seconds": 0.25},
        "unpatched": {"tokens": 1234567, "seconds": 61.5},
    },
    "tokens_without_seconds": 7000,
    "cached_not_told": 8000,
}


def test_what_a_gateway_has_seen_lost_is_printed_the_most_first():
    assert shadow_lines(SHADOW) == [
        "lost in 2.0 hours, 12,345 requests judged (1,200 still to be):",
        "       1,234,567 tokens       61.5 s   unpatched   the plugin saves these",
        "               5 tokens        0.2 s   salted",
        "    7,000 of these tokens have no seconds yet: too few streams to learn from",
        "    8,000 answers did not say what was cached: the worker's own total of hits was used",
        "    1 not judged: no_room (raise text_bytes)",
        "    2 not judged: no_usage (neither the answers nor the worker's /metrics say what was cached)",
        "    1,000 not judged: other",
    ]


@pytest.mark.parametrize(("seconds", "said"), [(0, "0 minutes"), (3599, "60 minutes"), (3600, "1.0 hours")])
def test_a_gateway_that_has_seen_nothing_says_so(seconds, said):
    nothing = dict.fromkeys(("waiting", "tokens_without_seconds", "cached_not_told"), 0)
    lines = shadow_lines({**nothing, "watched_seconds": seconds, "requests": {}, "lost": {}})
    assert lines == [f"lost in {said}, 0 requests judged:", "    nothing so far"]


def shadow(status: int = 200, answer: Any = None) -> App:
    body = json.dumps({"shadow": SHADOW} if answer is None else answer).encode()
    return App({STATUS: (status, body)})


def test_beside_a_worker_a_gateways_losses_are_printed(worker, examined, reachable, key):
    reachable.add(shadow(), GATEWAY)
    told = examined("--gateway", "127.0.0.1:8080/v1")
    assert told.status == 0 and told.text.endswith("\n".join(shadow_lines(SHADOW)) + "\n")
    assert examined("--gateway", GATEWAY, "--gateway-key-file", str(key)).status == 0


@pytest.mark.parametrize(
    ("app", "flags", "said"),
    [
        (None, (), f"no gateway answers at {GATEWAY}: connection refused"),
        (shadow(404), (), f"{GATEWAY} does not show {STATUS}: a gateway with admin_port does so there; is it one?"),
        (
            shadow(401),
            (),
            f"the gateway {GATEWAY} wants an API key (status 401), and none was given: --gateway-key-file",
        ),
        (
            shadow(403),
            ("key",),
            f"the gateway {GATEWAY} refuses the key in --gateway-key-file FILE (status 403): it is",
        ),
        (shadow(200, {}), (), f"{GATEWAY} is not a Seamark gateway"),
        (shadow(200, {"shadow": 1}), (), f"{GATEWAY} is not a Seamark gateway"),
    ],
)
def test_a_gateway_that_tells_nothing_fails_for_a_cause(worker, examined, reachable, key, app, flags, said):
    if app is not None:
        reachable.add(app, GATEWAY)
    told = examined("--gateway", GATEWAY, *(("--gateway-key-file", str(key)) if flags else ()))
    assert told.status == 1 and told.verdict.startswith(f"not reachable: {said}")
    assert told.line(f"WRONG {said}") and told.line("ok    patches are live")
    worker.status = 404
    told = examined("--gateway", GATEWAY, *(("--gateway-key-file", str(key)) if flags else ()))
    assert told.status == 1 and told.verdict.startswith("cannot hit: ") and told.line(f"WRONG {said}")


def test_a_gateway_without_a_port_has_that_of_http(worker, examined):
    assert "port" not in examined("--gateway", "http://spark").verdict


def test_a_url_that_is_none_shows_no_way(examined, monkeypatch):
    def find(url: str, around: Any) -> None:
        raise ValueError

    monkeypatch.setattr(doctor, "find", find)
    assert "is no URL" in examined(url="http://[").verdict


@pytest.mark.parametrize(
    "flags",
    [("--runs-as", "lxc"), ("--worker-api-key-file", "/nowhere"), ("--gateway-key-file", "/nowhere"), ("--works", "x")],
)
def test_a_wrong_command_line_or_key_file_exits_with_2(flags, capsys):
    with pytest.raises(SystemExit) as ended:
        doctor.main(["--worker", URL, *flags])
    (line,) = capsys.readouterr().err.splitlines()
    assert ended.value.code == 2 and line.startswith("seamark doctor: ")


def test_the_doctor_takes_a_worker_or_a_recipe(capsys):
    for flags in ([], ["--worker", "http://a:1", "--recipe", "vllm serve m"]):
        with pytest.raises(SystemExit):
            doctor.main(flags)
        assert "--worker URL, or --recipe RECIPE" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("recipe", "status", "lines"),
    [
        ("vllm serve Qwen3.6-27B", 0, ["will hit from request 2 on: "]),
        (
            "vllm serve Qwen3.6-27B --mamba-cache-mode align",
            0,
            ["will hit from request 2 on: ", "ok    --mamba-cache-mode is taken away"],
        ),
        ("vllm serve ./models/mine", 1, ["not to be told by the name ./models/mine"]),
        (
            "vllm serve Qwen3.6-27B --load-format b12x",
            1,
            ["no hits yet: its image holds a fork", "WRONG the one change: take vLLM "],
        ),
    ],
)
def test_what_a_recipe_will_do_is_said_without_a_worker(recipe, status, lines, capsys):
    assert doctor.main(["--recipe", recipe]) == status
    *said, last = capsys.readouterr().out.splitlines()
    assert len(said) == len(lines) and all(map(str.startswith, said, lines))
    assert last == f"(seamark setup '{recipe}' writes the files)"


def test_an_image_of_a_recipe_is_asked_for_its_version(monkeypatch, capsys):
    asked: list[str] = []
    monkeypatch.setattr(doctor, "image_version", lambda image: asked.append(image) or "0.30.1")
    assert doctor.main(["--recipe", "docker run vllm/vllm-openai:latest Qwen3.6-27B"]) == 1
    assert asked == ["vllm/vllm-openai:latest"] and "vLLM 0.30.1 (in its image)" in capsys.readouterr().out
    assert doctor.main(["--recipe", "vllm serve Qwen3.6-27B"]) == 0 and len(asked) == 1


def test_a_recipe_that_cannot_be_read_is_refused_in_one_line(capsys):
    with pytest.raises(SystemExit) as ended:
        doctor.main(["--recipe", "/nowhere/a.yaml"])
    (line,) = capsys.readouterr().err.splitlines()
    assert ended.value.code == 2 and "is no file, no command" in line
