"""What a probe makes of a worker's answers, and what of the probe before it stays."""

from __future__ import annotations

from dataclasses import replace

import pytest

from proxy.fleet.probe import ALL, NO_HTTP, OPTIONAL, Probe, Probed, Unwell, why_broken
from proxy.fleet.reports import Reports
from proxy.fleet.worker_metrics import EngineInfo, StepTimes, WorkerMetrics, read
from proxy.http.client import Broken, Malformed, Unreachable
from proxy.version import version
from tests.harness.fake_engine import engine_info

URL = "http://w:1"

INFO = b'seamark_engine_info{match_unit="%b",block_size="%b",version="0.3.0",vllm="0.32.0"} 1.0\n'

AWAKE = 'vllm:engine_sleep_state{engine="0",sleep_state="awake"} 1.0\n'


class Server:
    """A vLLM without the plugin, whose answers can have another status, be another one to posts, or be an exception."""

    def __init__(self) -> None:
        self.pages = {
            "/health": b"",
            "/metrics": f"process_start_time_seconds 1.0\n{AWAKE}".encode(),
            "/v1/models": b'{"data":[{"id":"m"}]}',
            "/version": b'{"version":"0.32.0"}',
        }
        self.asked: list[str] = []
        self.status: dict[str, int] = {}
        self.posts: dict[str, tuple[int, bytes] | Exception] = {}

    async def fetch(self, method: str, url: str, body: bytes = b"", timeout: float | None = None) -> tuple[int, bytes]:
        path = url.removeprefix(URL)
        self.asked.append(path)
        if method == "POST":
            answer = self.posts.get(path, (404, b""))
            if isinstance(answer, Exception):
                raise answer
            return answer
        if path not in self.pages:
            raise Unreachable
        return self.status.get(path, 200), self.pages[path]

    def add(self, metrics: str) -> None:
        self.pages["/metrics"] += metrics.encode()

    async def probe(self, last: Probed | None = None) -> Probed:
        async def lull() -> None:
            """Nobody else has work."""

        last = Probed() if last is None else last
        return await Probe(self, URL).probe(last, own_id="me", of_plugin=False, lull=lull)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("path", "status", "answer", "words"),
    [
        ("/health", 200, b'{"gateway":"me"}', "this is the gateway itself"),
        ("/health", 500, b"", "not well: /health answers 500"),
        ("/v1/models", 401, b"", "not vLLM: /v1/models answers 401"),
        ("/v1/models", 200, b'{"data":[{"id":' + b"7" * 5000 + b"}]}", "not vLLM: /v1/models lists no models"),
        *(
            ("/metrics", 200, metrics, "not vLLM: its /metrics cannot be read")
            for metrics in (
                b"process_start_time_seconds x\n",
                b"vllm:prefix_cache_hits_total NaN\n",
                INFO % (b"1" * 5000, b"384"),
                INFO % (b"16", b"-384"),
            )
        ),
    ],
)
async def test_what_cannot_be_used_is_unwell(path, status, answer, words):
    server = Server()
    server.pages[path], server.status[path] = answer, status
    with pytest.raises(Unwell, match=words) as found:
        await server.probe()
    assert status == 200 or (found.value.path, found.value.status) == (path, status)


async def test_what_a_worker_is_follows_from_what_it_says():
    server = Server()
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


RUST = b"not supported by the Rust frontend yet"


@pytest.mark.parametrize(
    ("posts", "lacks"),
    [
        ({OPTIONAL[0]: (404, b""), OPTIONAL[1]: (405, RUST), OPTIONAL[2]: (400, b"")}, OPTIONAL[:2]),
        ({OPTIONAL[0]: Broken(), OPTIONAL[1]: Unreachable(), OPTIONAL[2]: (501, RUST)}, OPTIONAL[2:]),
        (dict.fromkeys(OPTIONAL, (501, b"")), None),  # not the frontend in Rust
    ],
)
async def test_a_frontend_in_rust_is_known_by_its_words_with_the_routes_that_it_lacks(posts, lacks):
    server = Server()
    server.posts = posts
    frontend = await Probe(server, URL).frontend()
    assert frontend == (ALL if lacks is None else ("vLLM's Rust frontend", lacks))
    assert server.asked == list(OPTIONAL)


@pytest.mark.parametrize(
    ("error", "was_well", "words"),
    [
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
        (known(is_gateway=True), "serves m; a Seamark gateway, not a worker"),
        (
            known(metrics=WorkerMetrics(engine=replace(ENGINE, refused="a window"))),
            "serves m; vLLM 0.32.0; patched (Seamark 0.3.0, match unit 16 tokens), but it gets no hints: a window",
        ),
        (
            known(reports=Reports(why_not="why")),
            "serves m; vLLM 0.32.0; it has Seamark's plugin and gets no hints, since its reports cannot be read: why",
        ),
    ],
)
def test_what_a_worker_is_in_words(probed, words):
    assert probed.words.startswith(words)


OF_ENGINE = f'seamark_engine_info{{block_size="384",match_unit="16",version="{version()}",vllm="0.32.0"}}'


def test_all_that_a_patched_engine_says_is_read_and_nothing_else():
    text = (
        "# HELP process_start_time_seconds Start time of the process since unix epoch in seconds.\n"
        "# TYPE process_start_time_seconds gauge\n"
        "process_start_time_seconds 1.76378925345e+09\n"
        f"{OF_ENGINE} 1.0\n"
        "seamark_pass_seconds 0.5\n"
        "seamark_token_seconds 0.001\n"
        'vllm:prefix_cache_queries_total{engine="0",model_name="m"} 9000.0\n'
        'vllm:prefix_cache_hits_total{engine="0",model_name="m"} 1600.0\n'
        'vllm:cache_config_info{block_size="16",kv_cache_size_tokens="4096",num_gpu_blocks="None"} 1.0\n'
        'vllm:num_requests_running{engine="0",model_name="m"} 2.0\n'
        'vllm:num_requests_waiting{engine="0",model_name="m"} 1.0\n'
        'vllm:num_requests_waiting_by_reason{engine="0",reason="capacity"} 70.0\n'
    )
    engine = EngineInfo(version(), "0.32.0", 16, 384)
    assert read(text) == WorkerMetrics("1.76378925345e+09", engine, StepTimes(0.5, 0.001), 1600, 4096, 3)
    states = (("awake", 1, 0), ("discard_all", 0, 0), ("awake", 0, 1), ("odd", 1, 2))
    lines = (f'vllm:engine_sleep_state{{engine="{at}",sleep_state="{state}"}} {value}' for state, value, at in states)
    text = "\n".join([*lines, 'vllm:engine_sleep_state{sleep_state="weights_offloaded"} 1\n'])
    assert read(text).sleep_levels == (None, 0, 0, 1)


@pytest.mark.parametrize(
    "line",
    [
        f'seamark_engine_info{{version="{version()}"}} 1.0',
        OF_ENGINE.replace('"16"', '"0"') + " 1.0",
        "vllm:prefix_cache_hits_total many",
    ],
)
def test_samples_that_are_not_what_they_are_named_are_refused(line):
    with pytest.raises((ValueError, KeyError)):
        read(line + "\n")


@pytest.mark.parametrize("other", ["0.0.9", "99.0", ""])
def test_a_plugin_of_another_release_is_not_used_and_the_sentence_says_update_the_plugin(other):
    found = read(f'seamark_engine_info{{version="{other}"}} 1.0\n')  # whatever else it says
    assert found.engine is None
    assert found.other_release == (
        f"its plugin is Seamark {other or 'of unknown version'}, this gateway {version()}: update the plugin"
    )
    own = ".".join(version().split(".")[:2])
    patch = read(OF_ENGINE.replace(version(), f"{own}.99") + " 1.0\n")
    assert patch.engine is not None and not patch.other_release
