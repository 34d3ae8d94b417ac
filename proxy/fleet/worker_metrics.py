"""What a worker's engine tells on its `/metrics`: its own speed, where it has learnt that, and what its cache gave."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import NamedTuple

_BOOT_AND_ENGINE = re.compile(
    r"^(seamark_engine_info)\{(.*?)\} ([0-9.eE+]+)$|^(process_start_time_seconds) (\S+)$", re.M
)

_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')

_HITS = re.compile(r"^vllm:prefix_cache_hits_total(?:\{.*?\})? (\S+)$", re.M)

_RUNNING = re.compile(r"^vllm:num_requests_(?:running|waiting)(?:\{.*?\})? (\S+)$", re.M)

_CACHE = re.compile(r'^vllm:cache_config_info\{.*?\bkv_cache_size_tokens="(\d+)"', re.M)

_SAMPLE = re.compile(r"^seamark_(pass|token)_seconds(?:\{.*?\})? (\S+)$", re.M)


class StepTimes(NamedTuple):
    """Seconds; 0 while the engine has not learnt them."""

    pass_seconds: float = 0.0  # of a pass over hardly any tokens
    token_seconds: float = 0.0  # that each prompt token adds

    @property
    def known(self) -> bool:
        """Whether the engine has seen enough."""
        return self.token_seconds > 0

    def seconds(self, tokens: int, passes: int = 0) -> float:
        """Time that so many tokens and passes take; 0 while unknown."""
        return self.pass_seconds * passes + self.token_seconds * tokens


UNKNOWN = StepTimes()


def read_pace(text: str) -> StepTimes:
    """The pace in a worker's `/metrics`; unknown where the plugin does not run."""
    return StepTimes(**{f"{name}_seconds": float(value) for name, value in _SAMPLE.findall(text)})


def read_hits(text: str) -> int | None:
    """Prompt tokens that the prefix cache gave, by a worker's `/metrics`; None where it is not vLLM's."""
    found = _HITS.findall(text)
    return int(sum(map(float, found))) if found else None


def read_running(text: str) -> int:
    """Requests that run or wait in an engine, whoever sent them."""
    return int(sum(map(float, _RUNNING.findall(text))))


def read_cache_tokens(text: str) -> int:
    """Tokens that fit into an engine's cache; 0 where it does not say."""
    return sum(map(int, _CACHE.findall(text)))


@dataclass(frozen=True)
class EngineInfo:
    """Labels of `seamark_engine_info`; lengths in tokens."""

    version: str
    vllm: str
    match_unit: int
    block_size: int


def read_metrics(text: str) -> tuple[str, EngineInfo | None]:
    """Boot identity and engine info out of a worker's `/metrics`."""
    boot, engine = "", None
    for match in _BOOT_AND_ENGINE.finditer(text):
        if match[4]:
            boot = match[5]
        elif float(match[3]) == 1:
            labels = dict(_LABEL.findall(match[2]))
            engine = EngineInfo(labels["version"], labels["vllm"], int(labels["match_unit"]), int(labels["block_size"]))
    return boot, engine
