"""Whether a vLLM sleeps or is paused: its server is well then and takes requests, but computes none until it is woken.

Its metrics tell of a sleep (`/sleep`), not of a pause (`/pause`). Its engine can be asked for both, if it was started
with the routes that put it there (`VLLM_SERVER_DEV_MODE=1`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from proxy.http.json_body import loads

IS_SLEEPING, IS_PAUSED = "/is_sleeping", "/is_paused"

ASLEEP = "asleep"  # how the words for it begin


@dataclass
class EngineAnswers:
    """What a boot of a worker says at each of its two routes; None: nothing now. Routes that it lacks go."""

    boot: str
    said: dict[str, bool | None] = field(default_factory=lambda: dict.fromkeys((IS_SLEEPING, IS_PAUSED)))

    def take(self, path: str, status: int, body: bytes) -> None:
        """The route `path` has answered."""
        if status >= 500:  # its engines do not agree, for one
            return self.none(path)
        try:
            said = loads(body)[path.removeprefix("/")] if status == 200 else None
        except (ValueError, KeyError, TypeError):
            said = None
        if isinstance(said, bool):
            self.said[path] = said
        else:
            del self.said[path]
        return None

    def none(self, path: str) -> None:
        """The route `path` has not answered: one that slept does not count as awake for that."""
        self.said[path] = self.said[path] or None

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
