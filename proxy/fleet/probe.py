"""The one way to ask a worker what it is: for its health, metrics, models, sleep and version.

What is found is one value that never changes: the next probe makes another one, and it takes the old one's place whole.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from proxy.chat.chat import CHAT, MESSAGES, RESPONSES
from proxy.config_files import LOOPBACK
from proxy.fleet import worker_metrics
from proxy.fleet.model_names import ListedNames, listed_names, some_of
from proxy.fleet.worker_metrics import WorkerMetrics
from proxy.http.client import Broken, Malformed, Silent, Unreachable, Upstream
from proxy.http.json_body import loads

# Seconds for each question of a probe: a worker busy with a long prefill still answers, since its API server is another
# process; and for the question whether the engine sleeps, which it answers between two steps.
PROBE_TIMEOUT, SLEEP_TIMEOUT = 5.0, 1.0

MODELS, SOURCES = "/v1/models", "/kv_event_sources"
TOPIC = "seamark"  # how the plugin names itself in vLLM's list of KV event publishers

NO_HTTP = "what answers there does not speak HTTP: https:// instead of http://?"


class Unwell(Exception):
    """A worker answered, and cannot be used; the message says why."""

    def __init__(self, why: str, path: str = "", status: int = 0) -> None:
        """`status`: of the answer at `path`, if that is why."""
        super().__init__(why)
        self.path, self.status = path, status


OPTIONAL = (MESSAGES, RESPONSES, CHAT + "/render")  # routes that a frontend of vLLM may lack
RUST = b"Rust frontend"  # how it calls itself where it refuses


class Frontend(NamedTuple):
    """What a worker's HTTP server is, as far as that costs its clients something."""

    name: str = ""  # empty: it has all routes
    lacks: tuple[str, ...] = ()  # of `OPTIONAL`


ALL = Frontend()


@dataclass(frozen=True)
class Reports:
    """Where the metrics and events of a worker's engines are read.

    The plugin's middleware gives them at the worker's own address. Where there is none (vLLM's frontend in Rust, a
    `vllm serve` without the flag), the process that started the engines does, at a port that vLLM's own routes tell:
    `/metrics` of a Python frontend in a label, `/kv_event_sources` of every one.
    """

    url: str = ""  # base URL; empty: nowhere
    ranks: tuple[int, ...] = ()  # of the engines behind the worker's one address; empty if there is one
    why_not: str = ""  # if nowhere, and the worker shows that it has the plugin
    looked_at: str = ""  # HOST:PORT beside those of KV events, if nowhere, and it does not show it


NO_REPORTS = Reports()


class Told(NamedTuple):
    """What a worker's route `SOURCES` tells. The port alone is believed: none sends a gateway elsewhere."""

    at: str = ""  # HOST:PORT of the reports; empty: it names none
    beside: str = ""  # HOST:PORT where they are if KV events are on: the port before that of the events
    ranks: tuple[int, ...] = ()


def read_sources(answer: bytes) -> Told:
    """What an answer of `SOURCES` tells; nothing for what is none."""
    try:
        sources = {int(rank): source for rank, source in loads(answer).items() if isinstance(source, Mapping)}
    except (ValueError, AttributeError):
        return Told()
    ours = [source for source in sources.values() if source.get("topic") == TOPIC]
    ranks = tuple(sorted(sources)) if len(sources) > 1 else ()
    if ours:
        return Told(_host_and_port(ours[0]), ranks=ranks)
    theirs = [each for each in map(_host_and_port, sources.values()) if each]
    if not theirs:
        return Told(ranks=ranks)
    host, _, port = min(theirs, key=lambda each: int(each.rpartition(":")[2])).rpartition(":")
    return Told(beside=f"{host}:{int(port) - 1}", ranks=ranks)


def base_url(worker: str, at: str) -> str:
    """The base URL of a worker's reports, by its own one and the HOST:PORT that it tells. Raises `ValueError`."""
    told_host, _, port = at.rpartition(":")
    host = urlsplit(worker).hostname or ""
    if not (port.isascii() and port.isdecimal() and len(port) <= 5 and 0 < int(port) < 65536):
        raise ValueError(f"it names no port: {at[:64]!r}")
    if told_host.strip("[]") in LOOPBACK and host not in LOOPBACK:
        raise ValueError(
            f"they are read on its own machine alone (at {told_host}:{port}); SEAMARK_REPORTS_AT=0.0.0.0:PORT in "
            "vLLM's environment opens them"
        )
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


def _host_and_port(source: Mapping[str, Any]) -> str:
    """Of an endpoint as `tcp://*:5557`; empty if it has none."""
    endpoint = str(source.get("endpoint") or "")
    host, colon, port = endpoint.removeprefix("tcp://").rpartition(":")
    return f"{host}:{port}" if colon and port.isascii() and port.isdecimal() and len(port) <= 5 else ""


IS_SLEEPING, IS_PAUSED = "/is_sleeping", "/is_paused"
ASLEEP = "asleep"  # how the words for it begin


@dataclass
class EngineAnswers:
    """What a boot of a worker says at each of its two routes; None: nothing now. Routes that it lacks go.

    Metrics tell of a sleep (`/sleep`), not of a pause (`/pause`). An engine that was started with the routes which put
    it there (`VLLM_SERVER_DEV_MODE=1`) can be asked for both.
    """

    boot: str
    said: dict[str, bool | None] = field(default_factory=lambda: dict.fromkeys((IS_SLEEPING, IS_PAUSED)))

    def take(self, path: str, status: int = 500, body: bytes = b"") -> None:
        """What the route `path` has answered, if it has."""
        said = _field(body, path.removeprefix("/")) if status == 200 else None
        if status >= 500:  # its engines do not agree, for one: an engine that slept does not count as awake for that
            self.said[path] = self.said[path] or None
        elif isinstance(said, bool):
            self.said[path] = said
        else:
            del self.said[path]

    def why_asleep(self, levels: Sequence[int | None]) -> str:
        """Why nothing is computed, in a few words; empty if it is. `levels`: of each engine, None for one awake."""
        is_sleeping, is_paused = self.said.get(IS_SLEEPING), self.said.get(IS_PAUSED)
        if is_sleeping is False and is_paused is False:  # metrics are not told of a sleep of level 0 that /resume ends
            return ""
        slept = [level for level in levels if level is not None]
        if slept:
            some = f"{len(slept)} of {len(levels)} engines, " if len(slept) < len(levels) else ""
            return f"{ASLEEP} ({some}level {max(slept)}): POST /wake_up wakes it"
        if is_paused:  # vLLM calls a paused engine sleeping, too
            return f"{ASLEEP} (paused): POST /resume wakes it"
        return f"{ASLEEP}: POST /wake_up wakes it" if is_sleeping else ""


@dataclass(frozen=True)
class Probed:
    """What a worker has said of itself. If it sleeps, all but the models is from before: it computes nothing."""

    url: str = ""
    at: float = 0.0  # time.perf_counter() before it was asked for its metrics
    boot: str = ""  # changes when it restarts: what it held before is gone then
    is_gateway: bool = False  # a Seamark gateway
    is_vllm: bool = False  # and no gateway before one
    vllm: str = ""  # version of vLLM; empty: it does not say
    metrics: WorkerMetrics = field(default_factory=WorkerMetrics)
    reports: Reports = NO_REPORTS
    frontend: Frontend = ALL
    hits_before: int | None = None  # of `metrics.hits`, those from before this boot was first seen
    models: Sequence[Mapping[str, Any]] = ()
    answers: EngineAnswers = field(default_factory=lambda: EngineAnswers(""))
    asleep: str = ""  # why it computes nothing, in words; empty if it does

    @cached_property
    def names(self) -> ListedNames:
        return listed_names(self.models, one_engine=self.is_vllm)

    @property
    def words(self) -> str:
        models, engine, reports = some_of(sorted(self.names.templates)), self.metrics.engine, self.reports
        serves = f"serves {models or 'no model'}"
        if self.is_gateway:
            return f"{serves}; a Seamark gateway, not a worker: no hint is sent through it"
        if engine is None and not (self.metrics.other_release or self.vllm) and self.metrics.hits is None:
            return f"{serves}; not vLLM, as far as it shows: requests pass through without hints"
        serves += f"; vLLM {self.vllm or 'of unknown version'}; "
        if engine is not None:
            serves += f"patched (Seamark {engine.version}, match unit {engine.match_unit} tokens)"
            serves += f", but its reports cannot be read: {reports.why_not}" if reports.why_not else ""
            serves += f", but it gets no hints: {engine.refused}" if engine.refused else ""
            return serves + (f"; {engine.other_version}" if engine.other_version else "")
        if other := self.metrics.other_release:
            return f"{serves}it gets no hints: {other}"
        if why := reports.why_not:
            return f"{serves}it has Seamark's plugin and gets no hints, since its reports cannot be read: {why}"
        elsewhere = f", or its reports are not at {reports.looked_at}" if reports.looked_at else ""
        return f"{serves}not patched{elsewhere}, so it gets no hints: seamark doctor --worker {self.url}"


class Probe:
    """The questions to one worker. All raise `Unreachable` or `Broken` where nothing else is said."""

    def __init__(self, upstream: Upstream, url: str, name: str = "", seconds: float | None = None) -> None:
        """`url`: base URL; `name`: the worker's, if others share that; `seconds`: for each question."""
        self.upstream, self.url, self._name = upstream, url, name or url
        self._seconds = seconds or PROBE_TIMEOUT

    async def get(self, path: str, seconds: float | None = None) -> tuple[int, bytes]:
        return await self.upstream.fetch("GET", self.url + path, timeout=seconds or self._seconds)

    async def page(self, path: str, url: str | None = None) -> bytes:
        """What is found at `path` of the worker, or of another `url`; empty if nothing is."""
        try:
            status, answer = await self.upstream.fetch("GET", (url or self.url) + path, timeout=self._seconds)
        except (Unreachable, Broken):
            return b""
        return answer if status == 200 else b""

    async def post(self, path: str, body: Mapping[str, Any], seconds: float | None = None) -> tuple[int, bytes]:
        raw = json.dumps(body).encode()
        return await self.upstream.fetch("POST", self.url + path, raw, timeout=seconds or self._seconds)

    async def probe(self, last: Probed, *, own_id: str, of_plugin: bool, lull: Callable[[], Awaitable[None]]) -> Probed:
        """All that it says of itself, if it can be used. Raises `Unwell`.

        `last`: what it said before; `own_id`: what the gateway that asks says of itself; `of_plugin`: the worker is
        known to have the plugin, which gives what is read here of its metrics alone; `lull` is awaited before its
        answers are read.
        """
        status, health = await self.get("/health")
        gateway = gateway_id(health)
        if gateway == own_id:
            raise Unwell("this is the gateway itself: --worker must name a vLLM server")
        if status != 200:
            raise _wrong("/health", status)
        at = time.perf_counter()
        exposition, reports = await self.metrics(last.reports if of_plugin else NO_REPORTS)
        models = await self.models()
        await lull()
        found = read_metrics(exposition)
        boot, engine, is_gateway = f"{self._name}#{found.boot}", found.engine, gateway is not None
        vllm, hits_before = last.vllm if engine is None else engine.vllm, last.hits_before
        answers = EngineAnswers(boot, dict(last.answers.said)) if last.answers.boot == boot else EngineAnswers(boot)
        if asleep := await self.why_asleep(answers, found.sleep_levels):
            is_vllm = not is_gateway and (engine is not None or bool(vllm))
            return replace(last, models=models, is_vllm=is_vllm, answers=answers, asleep=asleep)
        frontend = last.frontend
        if boot != last.boot:
            if reports is last.reports:  # at the same port
                reports = replace(reports, ranks=(await self._sources()).ranks)
            hits_before = found.hits
            vllm = await self.version() if engine is None else vllm
            # One with the plugin's middleware runs Python, and so does one that says when it started.
            may_lack = reports.url not in ("", self.url) or not found.boot
            frontend = await self.frontend() if may_lack and (engine is not None or vllm) else ALL
        if engine is not None and not found.step_times.known:
            # A restarted engine learns them again: until then, the old ones stand.
            found = found._replace(step_times=last.metrics.step_times)
        is_vllm = not is_gateway and (engine is not None or bool(vllm))
        return Probed(
            self.url, at, boot, is_gateway, is_vllm, vllm, found, reports, frontend, hits_before, models, answers
        )

    async def models(self) -> list[dict[str, Any]]:
        """Its models, as OpenAI's API lists them. Raises `Unwell`."""
        status, answer = await self.get(MODELS)
        models = models_in(answer)
        if models is None:
            raise _wrong(MODELS, status)
        return models

    async def metrics(self, known: Reports = NO_REPORTS) -> tuple[bytes, Reports]:
        """Its metrics, for `read_metrics`, and where its reports are read.

        `known`: where they were; then they are asked for first, and alone: a worker has a thousand other metrics.
        """
        if known.url and (some := await self._of_plugin(known.url)):
            return some, known
        return await self._found((await self.get("/metrics"))[1])

    async def all_metrics(self) -> tuple[bytes, Reports]:
        """Everything in its metrics, with its reports, and where these are read."""
        exposition = (await self.get("/metrics"))[1]
        some, reports = await self._found(exposition)
        if reports.url in ("", self.url):
            return exposition, reports
        # Whether the frontend is Python's shows in what it says itself.
        others = [line for line in some.splitlines() if not line.startswith(worker_metrics.BOOT.encode())]
        return b"\n".join((exposition, *others)), reports

    async def _found(self, exposition: bytes) -> tuple[bytes, Reports]:
        """As `metrics`, of a worker whose own are `exposition`."""
        has_plugin, told = worker_metrics.ENGINE.encode() in exposition, await self._sources()
        if has_plugin and (some := await self._of_plugin(self.url)):
            return some, Reports(self.url, told.ranks)
        engine, why_not = read_metrics(exposition).engine if has_plugin else None, ""
        at = (engine.reports if engine is not None else "") or told.at or ("" if has_plugin else told.beside)
        if at:
            try:
                url = base_url(self.url, at)
            except ValueError as error:
                why_not = str(error)
            else:
                if some := await self._of_plugin(url):
                    return some, Reports(url, told.ranks)
                why_not = f"{url} does not give them"
        return exposition, Reports(why_not=why_not) if told.at or has_plugin else Reports(looked_at=at)

    async def _of_plugin(self, url: str) -> bytes:
        """What is read here of the metrics at `url`; empty unless the plugin has written them."""
        some = await self.page(worker_metrics.OF_PLUGIN, url)
        return some if worker_metrics.ENGINE.encode() in some else b""

    async def _sources(self) -> Told:
        return read_sources(await self.page(SOURCES))

    async def frontend(self) -> Frontend:
        """What its HTTP server lacks: a request that means nothing is refused for what it says, or for its route."""
        lacks, is_rust = [], False
        for path in OPTIONAL:
            try:
                status, answer = await self.post(path, {})
            except (Unreachable, Broken):
                continue
            is_rust = is_rust or RUST in answer
            if status in (404, 405, 501):
                lacks.append(path)
        return Frontend("vLLM's Rust frontend", tuple(lacks)) if is_rust else ALL

    async def why_asleep(
        self, answers: EngineAnswers, levels: Sequence[int | None], seconds: float = SLEEP_TIMEOUT
    ) -> str:
        """As of `EngineAnswers`, once it was asked: what it says is added to `answers`."""
        if not levels:  # not vLLM, or none that sleeps
            return ""

        async def ask(path: str) -> None:
            try:
                answers.take(path, *await self.get(path, seconds))
            except (Unreachable, Broken):
                answers.take(path)

        await asyncio.gather(*map(ask, tuple(answers.said)))
        return answers.why_asleep(levels)

    async def version(self) -> str:
        """Of its vLLM; empty if it does not say."""
        return version_in(await self.page("/version"))


def _field(answer: bytes, name: str) -> Any:
    """A field of an answer in JSON; None if it has none."""
    try:
        return loads(answer)[name]
    except (ValueError, KeyError, TypeError):
        return None


def gateway_id(health: bytes) -> str | None:
    """What a Seamark gateway says of itself at /health; None for another server, vLLM's answer is empty."""
    found = _field(health, "gateway")
    return None if found is None else str(found)


def models_in(answer: bytes) -> list[dict[str, Any]] | None:
    """The models of a list as OpenAI's API answers it, None if it is none. One that cannot be shown is no model."""
    try:
        listed = [entry for entry in _field(answer, "data") if isinstance(entry["id"], str)]
    except (KeyError, TypeError):
        return None
    return [entry for entry in listed if entry["id"].isprintable()]


def version_in(answer: bytes) -> str:
    """What vLLM says at /version; empty for anything else."""
    version = _field(answer, "version")
    return version if isinstance(version, str) and version.isprintable() else ""


def read_metrics(exposition: bytes) -> WorkerMetrics:
    """What a worker's metrics say. Raises `Unwell` if they cannot be read."""
    try:
        return worker_metrics.read(exposition.decode(errors="replace"))
    except (ValueError, KeyError, TypeError, ArithmeticError):
        raise Unwell("not vLLM: its /metrics cannot be read") from None


def _wrong(path: str, status: int) -> Unwell:
    """It answers `path` with `status`, or with nothing that vLLM would say."""
    if status >= 500:
        return Unwell(f"not well: {path} answers {status}", path, status)
    return Unwell(f"not vLLM: {path} {'lists no models' if status == 200 else f'answers {status}'}", path, status)


def why_broken(error: Broken, was_well: bool) -> str:
    """Why a worker that takes connections gives no answer. `was_well`: it has answered a probe."""
    if isinstance(error, Silent):
        return f"no answer within {PROBE_TIMEOUT:g} s"
    if isinstance(error, Malformed):
        return NO_HTTP
    # One that has answered has the right address: it stops, or this gateway does.
    return "it closes the connection without an answer" + ("" if was_well else ": https:// instead of http://?")
