"""Traffic that gives every query of every dashboard panel something to show, and whether each has shown it.

Two engines, one of them with a checkpoint directory, and gateways of every kind. One stands before workers that only
record, since no other pair prefills for each other here: vLLM's needs NIXL.
"""

from __future__ import annotations

import asyncio
import json
import math
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import httpx

from engine_patches.disk.files import SUFFIX
from proxy.bench.harness.client import CHAT, COMPLETION, open_client, prose
from proxy.bench.harness.planted import plugin_environment
from proxy.bench.harness.servers import MODEL_NAME, Server, Servers, free_port
from tests.harness.api_keys import bearer, entry
from tests.harness.dashboards import Query, queries
from tests.harness.engines import SharedServers
from tests.harness.recording_worker import recording_worker

SCRAPE_SECONDS = 1


class Series(NamedTuple):
    """One line of an answer."""

    labels: Mapping[str, str]
    values: tuple[float, ...]  # over time; a single one where an instant was asked for


class Prometheus:
    """A running server."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.started = time.time()
        self._client = httpx.Client(base_url=server.url + "/api/v1", timeout=30)

    def at(self, query: str) -> list[Series]:
        """What `query` is now."""
        found = self._ask("/query", query=query)
        return [Series(each["metric"], (float(each["value"][1]),)) for each in found]

    def over_time(self, query: str) -> list[Series]:
        """What `query` has been since the server was started, at every scrape."""
        found = self._ask("/query_range", query=query, start=self.started, end=time.time(), step=SCRAPE_SECONDS)
        return [Series(each["metric"], tuple(float(value) for _, value in each["values"])) for each in found]

    def _ask(self, path: str, **fields: Any) -> list[dict[str, Any]]:
        """Raises `ValueError` with what the server says where it does not take the query."""
        answer = self._client.post(path, data=fields).json()
        if answer["status"] != "success":
            raise ValueError(f"{fields['query']}: {answer['error']}")
        return answer["data"]["result"]


def installed(program: str) -> str:
    """Path of `prometheus` or `promtool`. Raises `RuntimeError` where it is not installed."""
    found = shutil.which(program)
    if found is None:
        raise RuntimeError(f"{program} is not installed (Debian's package prometheus)")
    return found


def prometheus(servers: Servers, folder: Path, jobs: Mapping[str, Sequence[Server]]) -> Prometheus:
    """Start one that scrapes each job's servers and keeps its data in `folder`; it ends with `servers`."""
    port = free_port()
    scraped = [
        {"job_name": job, "static_configs": [{"targets": [server.url.removeprefix("http://") for server in servers]}]}
        for job, servers in jobs.items()
    ]
    every = {"scrape_interval": f"{SCRAPE_SECONDS}s", "scrape_timeout": f"{SCRAPE_SECONDS}s"}
    config = folder / "prometheus.yml"
    config.write_text(json.dumps({"global": every, "scrape_configs": scraped}))  # JSON is YAML
    options = [
        f"--config.file={config}",
        f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address=127.0.0.1:{port}",
    ]
    server = servers.start("prometheus", port, [installed("prometheus"), *options], {})
    server.wait_until_ready("/-/ready", 30.0)
    return Prometheus(server)


# What a value of that unit can be in a run like this one; seconds shown as milliseconds would not be. Rates reach from
# the first to the last of four scrapes and are drawn out to the ends of their window, not each counter's by as much:
# a share of two can be a third too large.
PLAUSIBLE = {
    "suffix: min/h": (1e-6, 60.0),
    "s": (1e-6, 600.0),
    "percentunit": (1e-3, 1.35),
    "bytes": (1024.0, 2.0**36),
    "binBps": (1024.0, 2.0**36),
    "suffix: s/s": (1e-7, 60.0),
}

# Lines that a legend has to stand for: hit, partial, miss.
LINES = {"{{cache}}": 3}

# The gateways'
IN_TURN = ("--max-inflight", "3")  # some wait there

IN_SHADOW = ("--shadow",)

CAREFUL = ("--self-check-interval", "1")

# Words of a prefix that is worth waiting for; and of prompts of which the cache holds only some, and not all that grow.
LONG_WORDS, PRESSING_WORDS = 2600, 1500

LONG_ANSWER = 200  # tokens, which take seconds: a scrape each second sees what waits meanwhile

KEY = "ann"

# The engine's with a directory: a cache that two long prompts fill, so that what comes again comes from the disk.
STORING = ("--num-gpu-blocks-override", "40", "--max-num-batched-tokens", "320", "--checkpoint-keep", "all")

HANDED_OVER = {"do_remote_prefill": True, "remote_num_tokens": 496, "remote_prefill_cached_tokens": 0}

ODD_HINTS: tuple[Any, ...] = ([-16, 10**9, 64], "64", [3])


class Row(NamedTuple):
    """One query, evaluated."""

    query: Query
    series: int
    peak: float  # the largest value of any series at any time
    problem: str | None  # why it is not proved


class Rig(NamedTuple):
    """What the traffic goes to."""

    engine: Server  # with hardly any room
    wide_gateway: Server  # before it, which lets all through
    gateway: Server  # before it, which lets only a few requests through at once
    shadow: Server  # before it, which sends no hints
    careful: Server  # before it, which compares its answers in idle moments
    keyed: Server  # before it, which asks for an API key
    storing: Server  # before another engine, which has a checkpoint directory
    apart: Server  # before workers of which one prefills for the other
    states: Path  # that directory
    scraped: Mapping[str, Sequence[Server]]  # by job


@contextmanager
def started(fleet: Servers, shared: SharedServers, model: Path, folder: Path) -> Iterator[Rig]:
    """What is not `shared` is started here. Every other load from the directory is declined."""
    common: dict[str, Any] = {"connector": "NixlConnector", "cached": 0, "models": (MODEL_NAME,)}
    with recording_worker(transfer=HANDED_OVER, **common) as prefills, recording_worker(**common) as answers:
        apart = fleet.gateway(flags=("--worker", answers.url, "--prefill-worker", prefills.url))
        states = folder / "states"
        defects = {"seamark_disk": "tests.harness.engine_plugins:every_other_load_pays"}
        environment = {**plugin_environment(folder / "plugins", defects), "SEAMARK_PIN_SHARE": "0.4"}
        flags = (*STORING, "--checkpoint-dir", str(states))
        engine = fleet.engine("storing", model, flags=flags, environment=environment)
        engine.wait_until_ready()
        storing = fleet.gateway(engine)
        keys, port = folder / "keys.toml", free_port()
        keys.write_text(entry(KEY))
        keyed = fleet.gateway(shared.tight, flags=("--api-keys", str(keys), "--admin-port", str(port)))
        own = [fleet.gateway(shared.tight, flags=flags) for flags in (IN_TURN, IN_SHADOW, CAREFUL)]
        for gateway in (*own, keyed, storing, apart):
            gateway.wait_until_ready("/ready", seconds=60)
        pages = replace(keyed, url=f"http://127.0.0.1:{port}")  # its metrics, for which no key is asked
        gateways = (*own, pages, storing, apart, shared.tight_gateway, shared.untouched_gateway)
        scraped = {"seamark": gateways, "vllm": (shared.tight, engine, shared.untouched)}
        yield Rig(shared.tight, shared.tight_gateway, *own, keyed, storing, apart, states, scraped)


# None of these engines drafts: that they count is seen in tests/engine/drafts.
OF_DRAFTS = {"Rows of draft heads", "Hints with drafts"}


def evaluated(server: Prometheus) -> list[Row]:
    """All queries, as they are at this moment."""
    return [_row(server, query) for query in queries()]


def _row(server: Prometheus, query: Query) -> Row:
    asked = query.filled_in(time.time() - server.started, SCRAPE_SECONDS)
    found = server.over_time(asked) if query.over_time else server.at(asked)
    peak = max((value for each in found for value in each.values if math.isfinite(value)), default=0.0)
    return Row(query, len(found), peak, _problem(query, len(found), peak))


def _problem(query: Query, series: int, peak: float) -> str | None:
    if peak <= 0:
        return None if query.panel in OF_DRAFTS else "nothing but zero"
    if series < LINES.get(query.legend.partition(" ")[0], 1):
        return "a line is missing"
    least, most = PLAUSIBLE.get(query.unit, (1e-3, 1e6))
    return None if least <= peak <= most else f"not a plausible value of {query.unit}"


def proved(server: Prometheus, rig: Rig, say: Callable[[str], None]) -> list[Row]:
    """Send traffic until every query has something to show, or it is clear that some never will."""
    rows: list[Row] = []
    for number in range(10):  # on a machine with nothing else to do two or three are enough
        asyncio.run(one_round(rig, number))
        rows = evaluated(server)
        open_rows = sum(row.problem is not None for row in rows)
        say(f"round {number + 1}: {len(rows) - open_rows} of {len(rows)} queries proved")
        if not open_rows:
            break
    return rows


async def one_round(rig: Rig, number: int) -> None:
    """All of it once, the same for the same number. Raises `httpx.HTTPStatusError` if an answer is an error."""
    async with open_client() as client:
        await _hits_and_misses(client, rig.gateway.url, number)
        await _odd_requests(client, rig, number)
        await _followers(client, rig.gateway.url, number)
        await _pressure(client, rig.wide_gateway.url, number)
        await _without_hints(client, rig.shadow.url, number)
        await _compared(client, rig.careful.url, number)
        await _with_a_key(client, rig.keyed.url, number)
        await _stored(client, rig, number)
        await _apart(client, rig.apart.url, number)


async def _hits_and_misses(client: httpx.AsyncClient, url: str, number: int) -> None:
    system = f"Round {number}. {prose(300, number)}"
    for question in ("What is the tide?", "And the wind?"):
        await _chat(client, url, system, question)
    for year in (2026, 2027):  # what changes from day to day costs the hit
        await _chat(client, url, f"{system} Today is {year}-11-{number % 28 + 1:02}. {prose(40, number)}", "Which day?")
    for words in (4, 200):  # steps of every length, for the engine to learn from
        await _chat(client, url, prose(words, number), "Yes?", max_tokens=8)


async def _odd_requests(client: httpx.AsyncClient, rig: Rig, number: int) -> None:
    for hint in ODD_HINTS:
        body = {"prompt": f"{number} {prose(100, number)}", "max_tokens": 4, "vllm_xargs": {"seamark_boundaries": hint}}
        (await client.post(rig.engine.url + COMPLETION, json={"model": MODEL_NAME, **body})).raise_for_status()
    body = {"model": f"nobody's {number}", "messages": _messages(None, "?")}
    if (await client.post(rig.gateway.url + CHAT, json=body)).status_code != 404:
        raise RuntimeError("a model that nobody serves was answered")


async def _followers(client: httpx.AsyncClient, url: str, number: int) -> None:
    long = f"Round {number}. {prose(LONG_WORDS, 1000 + number)}"
    questions = (f"{each}?" for each in range(6))  # more than that gateway lets through at once
    await asyncio.gather(*(_chat(client, url, long, each, stream=True, max_tokens=LONG_ANSWER) for each in questions))


async def _pressure(client: httpx.AsyncClient, url: str, number: int) -> None:
    """A conversation whose last turn is gone when it goes on, while what all share is still there."""
    system = f"Pressure {number}. {prose(200, 500 + number)}"
    first = _messages(system, prose(PRESSING_WORDS, 600 + number))
    await _send(client, url, {"messages": first})
    others = (prose(PRESSING_WORDS, 700 + 50 * number + each) for each in range(12))  # more than an engine runs at once
    await asyncio.gather(*(_chat(client, url, system, other, max_tokens=LONG_ANSWER) for other in others))
    await _send(client, url, {"messages": [*first, {"role": "assistant", "content": "Yes."}, *_messages(None, "So?")]})


async def _without_hints(client: httpx.AsyncClient, url: str, number: int) -> None:
    """Streams of every length, for the shadow to learn from."""
    system = f"Shadow {number}. {prose(200, 900 + number)}"
    for words in (5, 40, 80, 120, 160, 240, 320, 400):
        usage = {"include_usage": True}
        await _chat(client, url, system, prose(words, number + words), stream=True, stream_options=usage)


async def _compared(client: httpx.AsyncClient, url: str, number: int) -> None:
    """A shared prompt, and quiet until something has been looked at. Raises `RuntimeError` if it never is."""
    system = f"Careful {number}. {prose(200, 950 + number)}"
    for question in ("High tide?", "Low tide?", "Slack water?"):
        await _chat(client, url, system, question)
    deadline = time.monotonic() + 30.0  # for an idle engine to be looked at
    while not (await client.get(url + "/seamark/status")).json()["self_check"]["checked"]:
        if time.monotonic() > deadline:
            raise RuntimeError("no answer was compared")
        await asyncio.sleep(0.2)


async def _with_a_key(client: httpx.AsyncClient, url: str, number: int) -> None:
    for question in ("High tide?", "Low tide?"):
        messages = _messages(f"With a key {number}. {prose(200, 970 + number)}", question)
        await _send(client, url, {"messages": messages}, bearer(KEY))


async def _stored(client: httpx.AsyncClient, rig: Rig, number: int) -> None:
    """A pinned prompt; and prompts that come again when the cache has forgotten them, some of their files damaged."""
    url = rig.storing.url
    body = {"model": MODEL_NAME, "messages": _messages(f"Pinned {number}. {prose(60, number)}", "?")}
    (await client.post(url + "/seamark/prefixes", json={"name": "rules", "body": body})).raise_for_status()
    for again in range(3):
        for each in range(4):
            system = f"Stored {number}. {prose(500, 2000 + 10 * number + each)}"
            await _chat(client, url, system, f"Question {again}?")
        for path in sorted(rig.states.rglob(f"*{SUFFIX}"))[:: again + 2]:
            with suppress(FileNotFoundError):  # the engine may have refused it just now
                path.write_bytes(path.read_bytes()[:-1])


async def _apart(client: httpx.AsyncClient, url: str, number: int) -> None:
    for words in (10, 900):
        await _chat(client, url, f"Apart {number}. {prose(words, 3000 + number)}", "Who computes this?")


def _messages(system: str | None, question: str) -> list[Mapping[str, str]]:
    first = [{"role": "system", "content": system}] if system is not None else []
    return [*first, {"role": "user", "content": question}]


async def _chat(client: httpx.AsyncClient, url: str, system: str, question: str, **fields: Any) -> None:
    await _send(client, url, {"messages": _messages(system, question), **fields})


async def _send(client: httpx.AsyncClient, url: str, body: Mapping[str, Any], headers: Mapping[str, str] = {}) -> None:
    body = {"model": MODEL_NAME, "max_tokens": 2, "temperature": 0, "ignore_eos": True, **body}
    (await client.post(url + CHAT, json=body, headers=dict(headers))).raise_for_status()
