"""The one reader of a worker's `/metrics`: its boot, its engine, that engine's speed, and what its cache gave."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Annotated, NamedTuple
from urllib.parse import urlencode

import msgspec
from msgspec import Meta
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample
from prometheus_client.utils import floatToGoString

from proxy.printable import printable
from proxy.version import version

BOOT = "process_start_time_seconds"
ENGINE = "seamark_engine_info"
PASS, TOKEN = "seamark_pass_seconds", "seamark_token_seconds"
HITS = "vllm:prefix_cache_hits_total"
CREATED = "vllm:prefix_cache_hits_created"  # when the server made that counter, to the microsecond
CACHE = "vllm:cache_config_info"
# From the start, and only with speculative decoding, except for a frontend in Rust: it always has it, and no `BOOT`.
DRAFTS = "vllm:spec_decode_num_drafts_total"
ACCEPTED = "vllm:spec_decode_num_accepted_tokens_total"
REQUESTS = ("vllm:num_requests_running", "vllm:num_requests_waiting")
LONG_PREFILL_WAITS = "seamark_long_prefill_waits_seconds_total"
SLEEP = "vllm:engine_sleep_state"  # of each engine, 1 at the state that it is in

# Levels of vLLM's sleep, by the state that says so; an engine in none of its states sleeps at level 0.
SLEEP_LEVELS = {"awake": None, "weights_offloaded": 1, "discard_all": 2}

MOST_CAUSE = 200  # characters of a cause that is shown in lines of logs and pages

_RATIO = re.compile(r"\d{1,9}(?:\.\d{1,20})?", re.ASCII)
_SIZE = re.compile(r"\d{1,15}", re.ASCII)

TOLD = "told"  # `EngineInfo.keep` of an engine that leaves nothing behind of a request which says so

# Where prefills that come over NIXL are checked.
NIXL, BEST_LANE = frozenset({"NixlConnector", "NixlPullConnector"}), "inside_pass"

# An engine shows a thousand samples, and parsing all of them would hold up the event loop for milliseconds.
_READ = (BOOT, ENGINE, PASS, TOKEN, HITS, CREATED, CACHE, DRAFTS, ACCEPTED, SLEEP, LONG_PREFILL_WAITS, *REQUESTS)

# What a worker with the plugin gives of its `/metrics`; writing all of them takes it milliseconds.
OF_PLUGIN = "/seamark/metrics?" + urlencode([("name[]", name) for name in _READ])

Length = Annotated[int, Meta(ge=1, lt=2**31)]


@dataclass(frozen=True)
class EngineInfo:
    """Labels of `seamark_engine_info`; lengths in tokens."""

    version: str
    vllm: str
    match_unit: Length  # what a hit is a multiple of
    block_size: Length
    # Past a state, up to which a request has to share: a draft head reads so far.
    ahead: Annotated[int, Meta(ge=0, lt=2**31)] = 0
    connector: str = ""  # vLLM's names of its KV connectors, joined by "+"
    lane: str = ""  # how states are kept beside them
    keep: str = ""  # `TOLD`: nothing of a request that says so is kept; else why it may be; empty: it does not tell
    refused: str = ""  # why it keeps no state for any hint; empty if hints count
    reports: str = ""  # HOST:PORT where its reports are read, empty if only by its middleware
    drafts: str = ""  # whether hints are in use beside its drafts: `worker.DRAFT_STATES`; empty: none

    @property
    def other_version(self) -> str:
        """In words, that the plugin is of another version than this gateway; empty if it is of the same.

        One that was built without its commit is of every commit.
        """
        is_same = all(mine == its for mine, its in zip(version().split("+"), self.version.split("+"), strict=False))
        return "" if is_same else f"{_differing(self.version)}: install both from one version"

    @property
    def loads_prefills(self) -> bool:
        """Whether a prompt that another worker computes can be handed over, bound to its contents."""
        return self.lane == BEST_LANE and not NIXL.isdisjoint(self.connector.split("+"))


class StepTimes(NamedTuple):
    """How long an engine's steps take, in seconds; 0 until the engine has learnt them."""

    pass_seconds: float = 0.0  # of a pass over hardly any tokens
    token_seconds: float = 0.0  # that each prompt token adds

    @property
    def known(self) -> bool:
        return self.token_seconds > 0

    def seconds(self, tokens: int, passes: int = 0) -> float:
        """Time that so many tokens and passes take; 0 while unknown."""
        return self.pass_seconds * passes + self.token_seconds * tokens


class Accepted(NamedTuple):
    """Drafts of one or more requests."""

    steps: int = 0  # forward passes that verified some
    tokens: int = 0  # accepted in them

    @property
    def per_step(self) -> float:
        return self.tokens / self.steps if self.steps else 0.0


class WorkerMetrics(NamedTuple):
    boot: str = ""  # when its server started, which tells one start from the next
    engine: EngineInfo | None = None  # None: no plugin of this release, or the plugin left vLLM untouched
    step_times: StepTimes = StepTimes()
    hits: int | None = None  # prompt tokens that the prefix cache gave so far; None: not vLLM's metrics
    cache_tokens: int = 0  # that fit into the engine's cache; 0: it does not say
    requests: int = 0  # that run or wait in the engine, whoever sent them
    sleep_levels: tuple[int | None, ...] = ()  # of each engine, None for one awake; empty: it does not say
    drafts: bool = False  # speculative decoding is on
    other_release: str = ""  # why a plugin that is there is not used, and the cure
    created: tuple[float, ...] = ()  # when its server made some of its counters, which no two servers have in common

    # For a diagnosis.
    accepted: Accepted | None = None  # of all engines since their start; None: vLLM counts nothing here
    prefix_caching: bool | None = None  # None: not told
    block_size: int | None = None  # tokens that vLLM alone finds a multiple of; None: not told
    blocks: int | None = None  # of its cache; None: not told
    at_once: float = 0.0  # requests of the longest context that they hold; 0: not told
    attention_only: bool = False  # no layer is recurrent
    connector: str = ""  # as of `EngineInfo`, whatever the plugin's release
    lane: str = ""
    long_prefill_waits: float = 0.0  # seconds that requests waited behind long prompts, in all
    long_prefill_threshold: int | None = None  # tokens a step, of such a prompt, that would have let them by


def samples_in(text: str) -> Iterator[Sample]:
    """All samples of an exposition. Raises `ValueError` if it is none."""
    return (sample for family in text_string_to_metric_families(text) for sample in family.samples)


def read(text: str) -> WorkerMetrics:
    """What the exposition `text` says. Raises `ValueError` if its samples are not what they are named."""
    found: dict[str, list[Sample]] = {name: [] for name in _READ}
    for sample in samples_in("\n".join(line for line in text.split("\n") if line.startswith(_READ))):
        if sample.name in found:
            found[sample.name].append(sample)

    def last(name: str) -> float:
        return found[name][-1].value if found[name] else 0.0

    def total(*names: str) -> int:
        return int(sum(sample.value for name in names for sample in found[name]))

    # As workers spell it, since gateways share boots. The function has no types.
    boot = str(floatToGoString(last(BOOT))) if found[BOOT] else ""  # type: ignore[no-untyped-call]
    engines = [sample.labels for sample in found[ENGINE] if sample.value == 1]
    engine = {name: printable(" ".join(value.split()))[:MOST_CAUSE] for name, value in (engines or [{}])[-1].items()}
    of_plugin = engine.get("version", "")
    is_other = bool(engines) and of_plugin.split(".")[:2] != version().split(".")[:2]
    other_release = f"{_differing(of_plugin)}: update the plugin" if is_other else ""
    caches = [sample.labels for sample in found[CACHE]]
    sizes = [_size(cache.get("kv_cache_size_tokens", "")) or 0 for cache in caches]
    cache = caches[-1] if caches else {}
    at_once = cache.get("kv_cache_max_concurrency", "")
    return WorkerMetrics(
        boot,
        msgspec.convert(engine, EngineInfo, strict=False) if engines and not other_release else None,
        StepTimes(last(PASS), last(TOKEN)),
        total(HITS) if found[HITS] else None,
        sum(sizes),
        total(*REQUESTS),
        _sleep_levels(found[SLEEP]),
        bool(found[DRAFTS]) and (bool(found[BOOT]) or any(sample.value > 0 for sample in found[DRAFTS])),
        other_release,
        tuple(sorted(sample.value for sample in found[CREATED])),
        Accepted(total(DRAFTS), total(ACCEPTED)) if found[DRAFTS] or found[ACCEPTED] or found[REQUESTS[0]] else None,
        {"True": True, "False": False}.get(cache.get("enable_prefix_caching", "")),
        _size(cache.get("block_size", "")),
        _size(cache.get("num_gpu_blocks", "")),
        float(at_once) if _RATIO.fullmatch(at_once) else 0.0,
        cache.get("mamba_block_size") == "None",  # vLLM sets it for recurrent layers
        engine.get("connector", ""),
        engine.get("lane", ""),
        sum(sample.value for sample in found[LONG_PREFILL_WAITS]),
        next((_size(sample.labels.get("threshold", "")) for sample in found[LONG_PREFILL_WAITS]), None),
    )


def _size(label: str) -> int | None:
    """Tokens; None for what is no number."""
    return int(label) if _SIZE.fullmatch(label) else None


def _sleep_levels(samples: Iterable[Sample]) -> tuple[int | None, ...]:
    levels: dict[str, int | None] = {}
    for sample in samples:
        engine = sample.labels.get("engine", "")
        levels.setdefault(engine, 0)
        if sample.value:
            levels[engine] = SLEEP_LEVELS.get(sample.labels.get("sleep_state", ""), 0)
    return tuple(levels.values())


def _differing(found: str) -> str:
    return f"its plugin is Seamark {found or 'of unknown version'}, this gateway {version()}"
