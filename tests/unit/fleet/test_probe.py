"""What a probe makes of a worker's answers, and what of the probe before it stays."""

from __future__ import annotations

from dataclasses import replace

import pytest

from proxy.fleet.probe import ALL, NO_HTTP, OPTIONAL, Probe, Probed, Unwell, why_broken
from proxy.fleet.reports import Reports
from proxy.fleet.worker_metrics import EngineInfo, StepTimes, WorkerMetrics
from proxy.http.client import Broken, Malformed, Unreachable
from tests.harness.fake_engine import engine_info
from tests.harness.probed import probed

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
        """More lines of `/metrics`."""
        self.pages["/metrics"] += metrics.encode()

    async def probe(self, last: Probed | None = None) -> Probed:
        async def lull() -> None:
            """Nobody else has work."""

        last = Probed() if last is None else last
        return await Probe(self, URL).probe(last, own_id="me", of_plugin=False, lull=lull)  # type: ignore[arg-type]


async def test_step_times_of_before_a_restart_stand_until_the_engine_has_learnt_them_again():
    server, times = Server(), StepTimes(0.01, 0.0001)
    server.add(engine_info())
    assert (await server.probe(probed("before", step_times=times))).metrics.step_times == times
    server.add("seamark_token_seconds 0.5\n")
    assert (await server.probe(probed("before", step_times=times))).metrics.step_times == (0.0, 0.5)


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
