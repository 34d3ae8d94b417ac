"""What each API key has used since the start: requests, and tokens as the engines report them.

Keys are called by their names in the keys file, so nobody but the operator can add one.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from proxy.chat.usage import Usage
from proxy.metrics import Metrics


@dataclass
class _Used:
    requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0  # of the prompts' tokens
    output_tokens: int = 0


class KeyUsage:
    """Totals by name of the key. One that is taken out of the file keeps what it has used."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._used: dict[str, _Used] = {}

    def request(self, name: str) -> None:
        """A request with the key called `name` has ended, however it did."""
        self._of(name).requests += 1
        self._metrics.key_requests.labels(name).inc()

    def tokens(self, name: str, usage: Usage) -> None:
        """And its engine has reported its tokens: of an answer that a client leaves early it reports none."""
        used, cached = self._of(name), usage.cached or 0
        used.prompt_tokens += usage.prompt
        used.cached_tokens += cached
        used.output_tokens += usage.output
        for kind, tokens in (("prompt", usage.prompt), ("cached", cached), ("output", usage.output)):
            self._metrics.key_tokens.labels(name, kind).inc(tokens)

    def as_json(self) -> list[dict[str, Any]]:
        """Totals of all keys that were used, by name; lengths in tokens."""
        return [{"name": name, **asdict(used)} for name, used in sorted(self._used.items())]

    def _of(self, name: str) -> _Used:
        return self._used.setdefault(name, _Used())
