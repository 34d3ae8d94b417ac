"""What a worker is: one vLLM server that clients' requests go to, or one engine of several behind one address.

A `Worker` holds what is known of it, and each fact has one source. `pool` keeps all workers and asks each again and
again, by a `probe`: is it well, asleep or gone, which start is it (`boot`), which version, where are its reports read.
`worker_metrics` reads what the engine says of itself in `/metrics`, `model_names` what the names in its list of models
mean. What it has to do, whether it fails and whether its cache may be used is noted here, as requests come and go; what
became of them in its engine, and what other gateways have there, is read from its feed (`routing.engine_events`).
"""

from __future__ import annotations

import asyncio
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from proxy.boundaries.boundary import Entry, Found
from proxy.boundaries.renderer import RenderFailed, WorkerRenderer, identify_renderer
from proxy.chat.chat import CHAT, Chat
from proxy.fleet.model_names import ListedNames, length_in
from proxy.fleet.probe import ASLEEP, Probed
from proxy.fleet.worker_metrics import EngineInfo, StepTimes
from proxy.http.asgi import HeaderList

# Different requests in a row that a worker took and failed. One that fails wherever it goes counts once.
BREAKER_FAILURES = 3

# Seconds until a worker that was taken out is tried with one request; doubled each time the trial fails.
TRIAL_SECONDS, MAX_TRIAL_SECONDS = 5.0, 60.0

SALT_BYTES = 16
VLLM_UNIT = 16  # tokens of a cache block, unless vLLM is told otherwise
LOCALHOST = frozenset({"localhost", "127.0.0.1", "::1"})

RANK_HEADER = b"x-data-parallel-rank"  # vLLM's
OWN_REQUESTS = "own-"  # begins the names (X-Request-Id) of what a gateway asks for itself


class CircuitBreaker:
    """Opens after `BREAKER_FAILURES` failures in a row; then one request at a time is a trial, until one succeeds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock  # in seconds
        self.failures: set[int] = set()  # fingerprints of requests, since the last success
        self._wait = TRIAL_SECONDS
        self._trial_at = 0.0  # of the clock
        self.on_trial = False
        self.is_open = False

    @property
    def wants_trial(self) -> bool:
        """Whether it is open, and the next request may be the one that closes it."""
        return self.is_open and not self.on_trial and self._clock() >= self._trial_at

    def failed(self, request: int) -> bool:
        """A request with this fingerprint failed; whether the breaker opens with it."""
        was_open = self.is_open
        if was_open and self.on_trial:
            self._wait = min(2 * self._wait, MAX_TRIAL_SECONDS)
        elif not was_open:
            self.failures.add(request)
            self.is_open, self._wait = len(self.failures) >= BREAKER_FAILURES, TRIAL_SECONDS
        self._trial_at = self._clock() + self._wait
        return self.is_open and not was_open

    def reset(self) -> None:
        self.failures.clear()
        self.is_open = False


class GateReport(NamedTuple):
    """Whether hints are in use beside an engine's drafts, as its feed says."""

    state: str  # of `DRAFT_STATES`
    figures: str  # of its trial, in words
    read_at: float  # time.perf_counter()


# On trial, states are kept for trial requests alone. With the setting at 1 or 0, hints are on or off from the start.
TRIAL, OPEN, CLOSED, ON, OFF = "trial", "open", "closed", "on", "off"
DRAFT_STATES = (TRIAL, OPEN, CLOSED, ON, OFF)


class Load(NamedTuple):
    requests: int = 0  # under way
    prefill_tokens: int = 0  # of prompts, still to be computed


NO_LOAD = Load()


class Slot:
    """One request at a worker. Nothing else counts what a worker has to do, or tries one that failed."""

    __slots__ = ("_is_trial", "_was_idle", "number", "prefill_tokens", "prompt", "worker")

    def __init__(self, worker: Worker, prompt: int, held: int = 0) -> None:
        """Take it, for a prompt of so many tokens, roughly, of which the worker holds some."""
        self.worker, self.prompt = worker, prompt
        self.prefill_tokens = max(0, prompt - held)  # to be computed before it answers, as far as is known
        self._was_idle = not worker.inflight
        self._is_trial = worker.breaker.is_open and worker.breaker.wants_trial
        worker.breaker.on_trial = worker.breaker.on_trial or self._is_trial
        worker.prefill_tokens += self.prefill_tokens
        worker.inflight += 1
        worker.dispatched += 1
        self.number = worker.dispatched  # of all that the worker has had

    @property
    def is_alone(self) -> bool:
        """Whether the worker has had no other request since it got this one."""
        return self._was_idle and self.worker.dispatched == self.number

    def left_to_compute(self, tokens: int) -> None:
        """Of the prompt, no more than so many; it never becomes more again."""
        if tokens < self.prefill_tokens:
            self.worker.prefill_tokens -= self.prefill_tokens - tokens
            self.prefill_tokens = tokens

    def give_back(self) -> None:
        """The worker is done with the request. Call it once."""
        self.worker.prefill_tokens -= self.prefill_tokens
        self.prefill_tokens = 0
        self.worker.inflight -= 1
        if self._is_trial:
            self.worker.breaker.on_trial = False


@dataclass
class Worker:
    """One vLLM server. `boot` changes when it restarts: what it held before is gone then."""

    url: str  # its name: its address without credentials, and `#RANK` for one of several engines behind that
    renderer: WorkerRenderer
    max_inflight: int = 0  # requests at it at once, 0 for no limit
    has_credentials: bool = False  # user and password, in the URL that the operator gave
    in_shadow: bool = False  # it is treated as one without the plugin

    probed: Probed = field(default_factory=Probed)  # what it said of itself when it was last asked: `learn`

    # What it showed beside probes, since it started.
    takes_any_name: bool | None = None  # what it said of a name that it does not list; None: it was not asked yet
    renderer_ids: dict[str, bytes] = field(default_factory=dict)  # by the base model whose template it is
    unrendered_models: set[str] = field(default_factory=set)  # that render nothing, as far as was tried
    merges_system: bool = False  # as of `chat_of`: its template takes one system message, the first

    # What the gateway makes of it.
    up: bool = False
    words: str = ""  # what it serves if it is up, else why it is down; empty: not known yet
    hints_allowed: bool = True  # states may be kept on it
    cache_allowed: bool = True  # anything may be taken from its cache
    breaker: CircuitBreaker = field(default_factory=CircuitBreaker)
    warming: bool = False  # prefixes are replayed on it; it gets requests only if no other worker can take them
    inflight: int = 0
    prefill_tokens: int = 0  # of requests that have not answered yet, as far as it does not hold them
    draft_gate: GateReport | None = None  # as its feed said last, since it started: `hear_of_drafts`
    shown_drafts: str = ""  # its state when that was shown last
    is_followed: bool = False  # its engine's events are being read: whether its cache was emptied is known
    others: Load = NO_LOAD  # what other gateways have there, as the worker's plugin tells; none if it does not
    self_check: asyncio.Task[Any] | None = None  # under way: it ends once a client's request goes to the worker
    dispatched: int = 0  # requests ever sent
    answered_at: float = float("-inf")  # time.monotonic() when its last answer began
    refusals: int = 0  # health checks in a row in which nothing listened there
    _salt: str = ""  # keeps requests away from what was cached before a quarantine; empty: nothing was

    # What each request asks of it, worked out when something of it changes.
    boot: str = field(init=False)  # its identity as it runs now; empty: not known yet
    names: ListedNames = field(init=False)
    step_times: StepTimes = field(init=False)
    engine: EngineInfo | None = field(init=False)  # None: no plugin of this release, or it is treated as none
    draft_state: str = field(init=False)  # of `DRAFT_STATES`, by what was heard last; empty without drafts
    takes_hints: bool = field(init=False)  # states can be kept on it, and may be
    # Tokens of which all that it takes from its cache is a multiple; 0: nothing may be taken from there. vLLM keeps
    # prefixes without the plugin and without a hint, too.
    match_unit: int = field(init=False)
    changes_salt: bool = field(init=False)  # requests go to it with another cache salt than their own

    def __post_init__(self) -> None:
        self.name = self.url.split("://", 1)[-1]  # in metrics and headers: host and port, path if any, and `#RANK`
        # The rank is that of its engine, among several behind the address; empty if it is the only one.
        self.address, _, self.rank = self.url.partition("#")
        self.learn(self.probed)

    def learn(self, probed: Probed) -> None:
        self.probed, self.boot, self.names = probed, probed.boot, probed.names
        self.step_times = probed.metrics.step_times
        self.engine = None if self.in_shadow else probed.metrics.engine
        self._work_out()

    def hear_of_drafts(self, gate: GateReport | None) -> None:
        """What its feed says of hints beside drafts; None: nothing."""
        self.draft_gate = gate
        self._work_out()

    def _work_out(self) -> None:
        engine, gate = self.engine, self.draft_gate
        told = engine.drafts if engine is not None else ""
        if self.rank and told in (TRIAL, OPEN, CLOSED):  # its server's metrics do not tell which engine they mean
            self.draft_state = gate.state if gate is not None else TRIAL
        else:
            self.draft_state = gate.state if gate is not None and gate.read_at >= self.probed.at else told
        is_ready = engine is not None and not engine.refused and self.draft_state in ("", OPEN, ON)
        self.takes_hints = is_ready and self.hints_allowed
        unit = engine.match_unit if engine is not None else VLLM_UNIT
        self.match_unit = unit if self.cache_allowed else 0
        self.changes_salt = bool(self._salt) or not self.cache_allowed

    def quarantine(self) -> None:
        """Answers from its cache differed from recomputed ones: use no hints and no held states; then, no cache."""
        self.cache_allowed = self.hints_allowed
        self.hints_allowed = False
        self._salt = fresh_salt()
        self._work_out()

    def restore(self) -> None:
        """An operator has seen to it. What was cached before the quarantine stays out of use."""
        self.hints_allowed = self.cache_allowed = True
        self._work_out()

    def salt(self, body: Mapping[str, Any]) -> str | None:
        """The cache salt to send with the request `body` instead of its own; None if that stands.

        `body` is empty if it was not read: then it is no request for tokens.
        """
        if not self.changes_salt or not body:
            return None
        given = body.get("cache_salt")
        if given is not None and (not isinstance(given, str) or not given):
            return None  # the worker's to refuse
        return (given or "") + (self._salt if self.cache_allowed else fresh_salt())

    def addressed(self, headers: HeaderList) -> HeaderList:
        """The headers of a request that its engine is to compute: these, whichever engine they named."""
        if not self.rank:
            return headers
        return [*(header for header in headers if header[0] != RANK_HEADER), (RANK_HEADER, self.rank.encode())]

    def is_same_server(self, other: Worker) -> bool:
        """Whether both are one server, at two addresses: for sure, since two servers may have started at one time."""
        mine, theirs = self.probed.metrics, other.probed.metrics
        if not mine.boot or (mine.boot, mine.created, self.rank) != (theirs.boot, theirs.created, other.rank):
            return False
        return bool(mine.created) or _at_this_machine(self.address) == _at_this_machine(other.address) != ""

    @property
    def refused(self) -> str:
        """Why its plugin gets no hints, or keeps no state for any, in shadow mode, too; empty if hints count."""
        engine = self.probed.metrics.engine
        return engine.refused if engine is not None else self.probed.metrics.other_release

    @property
    def other_version(self) -> str:
        """In words, that its plugin is of another version of this release; empty if it is not."""
        return self.engine.other_version if self.engine is not None else ""

    @property
    def trial_figures(self) -> str:
        """How far its trial of drafts is, for people; empty if that is not known (yet), or hints are open."""
        gate = self.draft_gate
        return gate.figures if gate is not None and gate.state == self.draft_state in (TRIAL, CLOSED) else ""

    @property
    def why_down(self) -> str:
        """Why it gets no requests, in a few words; empty if it is up, or nothing is known."""
        return "" if self.up else self.words

    @property
    def is_asleep(self) -> bool:
        """Whether it was found well and asleep, or paused."""
        return self.why_down.startswith(ASLEEP)

    def hint(self, found: Found | None) -> tuple[Entry, ...]:
        """The hint that it gets: none if it renders by another template than the one whose facts were used."""
        if found is None or not self.takes_hints or found.renderer_id not in self.renderer_ids.values():
            return ()
        return found.entries()

    @property
    def has_room(self) -> bool:
        return not self.max_inflight or self.inflight < self.max_inflight

    def restarted(self) -> None:
        """What it held and what it showed before is gone."""
        self.breaker.reset()
        self.renderer_ids.clear()
        self.unrendered_models.clear()
        self.renderer.forget_routes()
        self.takes_any_name = None
        self.merges_system = False
        self.draft_gate, self.shown_drafts, self._salt = None, "", ""  # and its cache is empty
        self._work_out()

    def serves(self, model: Any) -> bool:
        return isinstance(model, str) and model in self.names.templates

    def listed(self, model: Any) -> str:
        """The name in its list that stands for `model`: that of its base model for one that it does not list."""
        if isinstance(model, str) and (model in self.names.templates or not self.names.base):
            return model
        return self.names.base

    def length(self, model: Any) -> float:
        """Tokens that a prompt for `model` and its answer may have together, as far as it says."""
        name = self.listed(model)
        return next((length_in(card) for card in self.probed.models if card["id"] == name), 0) or math.inf

    def template_of(self, model: Any) -> str:
        """The base model whose chat template a request for `model` is rendered by."""
        templates = self.names.templates
        if isinstance(model, str) and model in templates:
            return templates[model]
        name = self.listed(model)
        return templates.get(name, name)

    def renderer_id(self, model: Any) -> bytes | None:
        """What `model` is rendered with; None: not known."""
        return self.renderer_ids.get(self.template_of(model))

    async def identify(self, model: Any) -> bytes | None:
        """As `renderer_id`; asks the worker if it is not known yet. None: it does not tell."""
        name = self.template_of(model)
        if name not in self.renderer_ids and (found := await identify_renderer(self.renderer, name)) is not None:
            self.renderer_ids[name] = found
        return self.renderer_ids.get(name)


def fresh_salt() -> str:
    return os.urandom(SALT_BYTES).hex()


def sound_of(workers: Sequence[Worker]) -> Sequence[Worker]:
    """Those that do not fail, or one that is to be tried again. If all fail, all: some requests may still succeed."""
    sound = [worker for worker in workers if not worker.breaker.is_open]
    if not sound:
        return workers
    trial = next((worker for worker in workers if worker.breaker.wants_trial and worker.has_room), None)
    return sound if trial is None else [trial]


def _at_this_machine(address: str) -> str:
    """An address that names this machine by one of its usual names, by a common one; empty for any other."""
    parts = urlsplit(address)
    return parts._replace(netloc=f":{parts.port}").geturl() if parts.hostname in LOCALHOST else ""


async def prompt_of(chat: Chat, worker: Worker) -> list[int]:
    """The prompt as the worker computes it. Raises `RenderFailed`."""
    if chat.ids is not None and chat.body.get("truncate_prompt_tokens") is None:
        return list(chat.ids)
    try:
        return await worker.renderer(chat.asked, chat.path)
    except RenderFailed:
        if chat.native is None or chat.is_bare:
            raise
        return await worker.renderer(chat.body, CHAT)
