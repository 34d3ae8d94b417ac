"""What the scheduler knows of one request: its hint, and how far it has come.

The object hangs on vLLM's `Request` as `request.seamark`, so it lives as long as the request: through preemption and
resumption, and no longer.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class RequestState:
    """Positions and lengths in tokens."""

    positions: tuple[int, ...] = ()  # usable positions of its hint, ascending
    hinted: bool = False  # it came with a hint, usable or not
    chunk_start: int = 0  # where its running chunk begins
    keys: set[int] = field(default_factory=set)  # positions at which its attention blocks carry keys of ours
    reported_to: int = 0  # its states up to here are in the events
    not_held: bool = False  # counted as a follower for which waiting did not pay
    gave_up_on: str | None = None  # id of the leader it has waited for long enough
    upstream_junction: int = 0  # the shared prefix that vLLM itself found
    own_junction: int = -1  # what `end_chunk` last wrote over it
