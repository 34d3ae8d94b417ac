"""What a probe makes of a worker's answers, and what of the probe before it stays."""

from __future__ import annotations

import json
from dataclasses import FrozenInstanceError, replace

import pytest

from proxy.fleet.probe import (
    ALL,
    NO_HTTP,
    OPTIONAL,
    Probe,
    Probed,
    Unwell,
    gateway_id,
    models_in,
    version_in,
    why_broken,
)
from proxy.fleet.reports import Reports
from proxy.fleet.sleep import IS_PAUSED
from proxy.fleet.worker_metrics import (
    MOST_CAUSE,
    OF_PLUGIN,
    EngineInfo,
    StepTimes,
    WorkerMetrics,
    read,
    read_setup,
)
from proxy.http.client import Broken, Malformed, Silent, Unreachable
from tests.harness.fake_engine import engine_info
from tests.harness.probed import probed

URL = "http://w:1"

INFO = b'seamark_engine_info{match_unit="%b",block_size="%b",version="0.3.0",vllm="0.32.0"} 1.0\n'

AWAKE = 'vllm:engine_sleep_state{engine="0",sleep_state="awake"} 1.0\n'


class Server:
    """A vLLM without the plugin."""

    def __init__(self) -> None:
        self.pages = {
            "/health": b"",
            "/metrics": f"process_start_time_seconds 1.0\n{AWAKE}".encode(),
            "/v1/models": b'{"data":[{"id":"m"}]}',
            "/version": b'{"version":"0.32.0"}',
        }
        self.asked: list[str] = []

    async def fetch(self, method: str, url: str, body: bytes = b"", timeout: float | None = None) -> tuple[int, bytes]:
        path = url.removeprefix(URL)
        self.asked.append(path)
        if path not in self.pages:
            raise Unreachable
        return 200, self.pages[path]

    def add(self, metrics: str) -> None:
        """More lines of `/metrics`."""
        self.pages["/metrics"] += metrics.encode()

    async def probe(self, last: Probed | None = None) -> Probed:
        async def lull() -> None:
            """Nobody else has work."""

        last = Probed() if last is None else last
        return await Probe(self, URL).probe(last, own_id="me", of_plugin=False, lull=lull)  # type: ignore[arg-type]


async def test_what_is_the_same_for_a_boot_is_asked_once_and_the_rest_is_new_each_time():
    server = Server()
    first = await server.probe()
    server.pages["/v1/models"] = b'{"data":[{"id":"m"},{"id":"n"}]}'
    server.add("vllm:prefix_cache_hits_total 5.0\n")
    second = await server.probe(first)
    assert server.asked.count("/version") == 1 and first.boot == second.boot == f"{URL}#1.0"
    assert (first.names.bases, second.names.bases) == ((("m",),), (("m", "n"),))
    assert (first.metrics.hits, second.metrics.hits, second.hits_before) == (None, 5, None)
    assert second.vllm == "0.32.0" and first.at < second.at
    with pytest.raises(FrozenInstanceError):
        first.boot = "another"  # type: ignore[misc]


async def test_one_that_falls_asleep_is_known_as_it_was_but_for_its_models():
    server = Server()
    awake = await server.probe()
    server.pages |= {"/v1/models": b'{"data":[{"id":"n"}]}', IS_PAUSED: json.dumps({"is_paused": True}).encode()}
    server.add("vllm:prefix_cache_hits_total 5.0\n")
    asleep = await server.probe(awake)
    assert asleep.asleep == "asleep (paused): POST /resume wakes it" and not awake.asleep
    known = replace(asleep, models=awake.models, answers=awake.answers, asleep="")
    assert known == awake and list(asleep.names.templates) == ["n"]
    del server.pages[IS_PAUSED]
    assert (await server.probe(asleep)).asleep  # it does not answer, and is not awake for that
    assert awake.answers.said[IS_PAUSED] is None


async def test_step_times_of_before_a_restart_stand_until_the_engine_has_learnt_them_again():
    server, times = Server(), StepTimes(0.01, 0.0001)
    server.add(engine_info())
    assert (await server.probe(probed("before", step_times=times))).metrics.step_times == times
    server.add("seamark_token_seconds 0.5\n")
    assert (await server.probe(probed("before", step_times=times))).metrics.step_times == (0.0, 0.5)


@pytest.mark.parametrize(
    ("path", "answer", "words"),
    [
        ("/health", b'{"gateway":"me"}', "this is the gateway itself"),
        ("/v1/models", b"{}", "not vLLM: /v1/models lists no models"),
        ("/v1/models", b"[" * 10**5, "not vLLM: /v1/models lists no models"),
        ("/v1/models", b'{"data":[{"id":' + b"7" * 5000 + b"}]}", "not vLLM: /v1/models lists no models"),
        ("/metrics", b"process_start_time_seconds x\n", "not vLLM: its /metrics cannot be read"),
        ("/metrics", b"vllm:num_requests_running +Inf\n", "not vLLM: its /metrics cannot be read"),
        ("/metrics", b"vllm:prefix_cache_hits_total NaN\n", "not vLLM: its /metrics cannot be read"),
        ("/metrics", INFO % (b"1" * 5000, b"384"), "not vLLM: its /metrics cannot be read"),
        ("/metrics", INFO % (b"16", b"9" * 30), "not vLLM: its /metrics cannot be read"),
        ("/metrics", INFO % (b"16", b"-384"), "not vLLM: its /metrics cannot be read"),
    ],
)
async def test_what_cannot_be_used_is_unwell(path, answer, words):
    server = Server()
    server.pages[path] = answer
    with pytest.raises(Unwell, match=words):
        await server.probe()


def test_a_model_whose_name_a_terminal_would_obey_is_none():
    names = ["openai/gpt-oss 120b", "m\x1b[2J", "m\n2026-11-25 INFO forged", "m\x9b31m", "m\u202e", "m\ud800", "漢"]
    told = json.dumps({"data": [{"id": name} for name in names]}).encode()
    assert [each["id"] for each in models_in(told) or []] == [names[0], names[-1]]


def test_what_a_plugin_says_of_itself_is_kept_short_and_printable():
    evil = "0.3.0\x1b[2J" + "x" * 300
    labels = ",".join(f'{name}="{evil}"' for name in ("version", "vllm", "connector", "lane", "refused"))
    text = f'seamark_engine_info{{match_unit="16",block_size="384",{labels}}} 1.0\n'
    engine, setup = read(text).engine, read_setup(text)
    assert engine is not None
    for said in (
        engine.version,
        engine.vllm,
        engine.connector,
        engine.lane,
        engine.refused,
        setup.connector,
        setup.lane,
    ):
        assert said.isprintable() and len(said) <= 4 * MOST_CAUSE and said.startswith("0.3.0\\x1b[2J")


def test_models_without_end_are_counted_in_the_log():
    known = probed("w#1", None, *(f"m{number}" for number in range(9)), hits=0)
    assert known.words.startswith("serves m0, m1, m2, m3 and 5 more; vLLM of unknown version; not patched")


class Speaking(Server):
    """One whose answers can have another status, be another one to posts, or be an exception."""

    def __init__(self) -> None:
        super().__init__()
        self.status: dict[str, int] = {}
        self.posts: dict[str, tuple[int, bytes] | Exception] = {}
        self.seconds: list[float | None] = []

    async def fetch(self, method: str, url: str, body: bytes = b"", timeout: float | None = None) -> tuple[int, bytes]:
        path = url.removeprefix(URL)
        self.seconds.append(timeout)
        if method == "POST":
            self.asked.append(path)
            answer = self.posts.get(path, (404, b""))
            if isinstance(answer, Exception):
                raise answer
            return answer
        _, answer = await super().fetch(method, url, body, timeout)
        return self.status.get(path, 200), answer


@pytest.mark.parametrize(
    ("path", "status", "words"),
    [
        ("/health", 500, "not well: /health answers 500"),
        ("/health", 499, "not vLLM: /health answers 499"),
        ("/health", 503, "not well: /health answers 503"),
        ("/v1/models", 401, "not vLLM: /v1/models answers 401"),
        ("/v1/models", 502, "not well: /v1/models answers 502"),
    ],
)
async def test_an_answer_with_another_status_says_whether_it_is_vllm_at_all(path, status, words):
    server = Speaking()
    server.status[path] = status
    server.pages[path] = b"odd"
    with pytest.raises(Unwell, match=words) as found:
        await server.probe()
    assert (found.value.path, found.value.status) == (path, status)


async def test_what_a_worker_is_follows_from_what_it_says():
    server = Speaking()
    plain = await server.probe()
    assert (plain.is_vllm, plain.is_gateway, plain.vllm, plain.metrics.engine) == (True, False, "0.32.0", None)
    del server.pages["/version"]
    other = await server.probe()
    assert (other.is_vllm, other.is_gateway, other.vllm) == (False, False, "")
    server.add(engine_info())
    patched = await server.probe()
    assert patched.metrics.engine is not None and patched.is_vllm and patched.vllm == patched.metrics.engine.vllm
    server.pages["/health"] = b'{"gateway":"another"}'
    gateway = await server.probe()
    assert (gateway.is_vllm, gateway.is_gateway) == (False, True)


async def test_a_gateway_that_sleeps_behind_another_one_is_none_of_vllms():
    server = Speaking()
    server.pages["/health"] = b'{"gateway":"another"}'
    server.pages["/metrics"] = server.pages["/metrics"].replace(b'"awake"} 1.0', b'"weights_offloaded"} 1.0')
    asleep = await server.probe()
    assert asleep.asleep.startswith("asleep") and not asleep.is_vllm
    server.pages["/health"] = b""
    assert not (await server.probe()).is_vllm  # it has not told its version before
    assert (await server.probe(replace(Probed(), vllm="0.32.0"))).is_vllm


RUST = b"not supported by the Rust frontend yet"


@pytest.mark.parametrize(
    ("posts", "lacks"),
    [
        (dict.fromkeys(OPTIONAL, (501, RUST)), OPTIONAL),
        ({OPTIONAL[0]: (404, b""), OPTIONAL[1]: (405, RUST), OPTIONAL[2]: (400, b"")}, OPTIONAL[:2]),
        ({OPTIONAL[0]: Broken(), OPTIONAL[1]: Unreachable(), OPTIONAL[2]: (501, RUST)}, OPTIONAL[2:]),
        (dict.fromkeys(OPTIONAL, (400, RUST)), ()),
        (dict.fromkeys(OPTIONAL, (501, b"")), None),  # not the frontend in Rust
    ],
)
async def test_a_frontend_in_rust_is_known_by_its_words_with_the_routes_that_it_lacks(posts, lacks):
    server = Speaking()
    server.posts = posts
    frontend = await Probe(server, URL).frontend()
    assert frontend == (ALL if lacks is None else ("vLLM's Rust frontend", lacks))
    assert server.asked == list(OPTIONAL)


async def test_a_worker_that_says_when_it_started_is_not_asked_for_its_frontend_and_another_one_once():
    server = Speaking()
    server.posts = dict.fromkeys(OPTIONAL, (501, RUST))
    assert (await server.probe()).frontend == ALL and not set(OPTIONAL) & set(server.asked)
    server.pages["/metrics"] = AWAKE.encode()
    first = await server.probe()
    assert first.frontend.lacks == OPTIONAL and first.boot == f"{URL}#"
    server.asked.clear()
    again = await server.probe(first)
    assert again.frontend == first.frontend and not set(OPTIONAL) & set(server.asked)


async def test_each_question_is_given_its_seconds():
    server = Speaking()
    probe = Probe(server, URL)
    await probe.get("/health")
    await probe.get("/health", 2.0)
    await probe.post("/x", {})
    await probe.post("/x", {}, 3.0)
    short = Probe(server, URL, seconds=0.5)
    await short.get("/health")
    await short.post("/x", {})
    assert server.seconds == [5.0, 2.0, 5.0, 3.0, 0.5, 0.5]


@pytest.mark.parametrize(
    ("answer", "version"),
    [
        (b'{"version":"0.32.0"}', "0.32.0"),
        (b'{"version":7}', ""),
        (b'{"version":"\\u001b"}', ""),
        (b"[]", ""),
        (b"{", ""),
    ],
)
def test_a_version_is_a_text_that_can_be_shown(answer, version):
    assert version_in(answer) == version


@pytest.mark.parametrize(
    ("health", "gateway"),
    [(b'{"gateway":"me"}', "me"), (b"", None), (b"{}", None), (b"[]", None), (b"[" * 10**5, None)],
)
def test_a_gateway_says_who_it_is_at_its_health(health, gateway):
    assert gateway_id(health) == gateway


@pytest.mark.parametrize(
    ("error", "was_well", "words"),
    [
        (Silent(), False, "no answer within 5 s"),
        (Malformed(), True, NO_HTTP),
        (Broken(), True, "it closes the connection without an answer"),
        (Broken(), False, "it closes the connection without an answer: https:// instead of http://?"),
    ],
)
def test_why_a_worker_that_takes_connections_gives_no_answer(error, was_well, words):
    assert why_broken(error, was_well) == words


def known(**fields) -> Probed:
    return replace(Probed(url="http://w:1", models=[{"id": "m"}], vllm="0.32.0"), **fields)


ENGINE = EngineInfo("0.3.0", "0.32.0", 16, 384)


@pytest.mark.parametrize(
    ("probed", "words"),
    [
        (known(), "serves m; vLLM 0.32.0; not patched, so it gets no hints: seamark doctor --worker http://w:1"),
        (known(models=()), "serves no model; vLLM 0.32.0; not patched, so it"),
        (known(vllm=""), "serves m; not vLLM, as far as it shows"),
        (known(vllm="", metrics=WorkerMetrics(hits=0)), "serves m; vLLM of unknown version; not patched"),
        (known(is_gateway=True), "serves m; a Seamark gateway, not a worker"),
        (
            known(metrics=WorkerMetrics(engine=ENGINE)),
            "serves m; vLLM 0.32.0; patched (Seamark 0.3.0, match unit 16 tokens)",
        ),
        (
            known(metrics=WorkerMetrics(engine=replace(ENGINE, refused="a window"))),
            "serves m; vLLM 0.32.0; patched (Seamark 0.3.0, match unit 16 tokens), but it gets no hints: a window",
        ),
        (
            known(metrics=WorkerMetrics(engine=ENGINE), reports=Reports(why_not="why")),
            "serves m; vLLM 0.32.0; patched (Seamark 0.3.0, match unit 16 tokens), but its reports cannot be read: why",
        ),
        (
            known(reports=Reports(why_not="why")),
            "serves m; vLLM 0.32.0; it has Seamark's plugin and gets no hints, since its reports cannot be read: why",
        ),
        (
            known(reports=Reports(looked_at="h:1")),
            "serves m; vLLM 0.32.0; not patched, or its reports are not at h:1, so it gets no hints: seamark doctor",
        ),
    ],
)
def test_what_a_worker_is_in_words(probed, words):
    assert probed.words.startswith(words)


async def test_reports_are_read_where_they_were_and_else_where_the_worker_says():
    server = Speaking()
    server.add(engine_info())
    few = server.pages["/metrics"]
    told = await Probe(server, URL).metrics()
    assert told[0] == few and "cannot be read" not in told[1].why_not
    server.pages[OF_PLUGIN] = b"few " + few
    assert await Probe(server, URL).metrics() == (b"few " + few, Reports(URL))
    server.asked.clear()
    assert (await Probe(server, URL).metrics(Reports(URL, (0, 1))))[1] == Reports(URL, (0, 1))
    assert server.asked == [OF_PLUGIN]
    server.status[OF_PLUGIN] = 404
    some, reports = await Probe(server, URL).metrics(Reports(URL))
    assert some == few and reports.url == ""
    server.status.clear()
    server.pages[OF_PLUGIN] = b"of something else"
    assert (await Probe(server, URL).metrics(Reports(URL)))[1].url == ""
