"""What a probe makes of a worker's answers, and what of the probe before it stays."""

from __future__ import annotations

import json
from dataclasses import FrozenInstanceError, replace

import pytest

from proxy.fleet.probe import Probe, Probed, Unwell, models_in
from proxy.fleet.sleep import IS_PAUSED
from proxy.fleet.worker_metrics import MOST_CAUSE, StepTimes, read, read_setup
from proxy.http.client import Unreachable
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
