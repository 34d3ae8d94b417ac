"""What the scheduler knows of one request: what it wishes to have kept, and how far it has come.

The state hangs on vLLM's `Request` as `request.seamark`, so it lives as long as the request: through preemption and
resumption, and no longer.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple


class TurnEnd(NamedTuple):
    """The last turn of a prompt, in tokens."""

    start: int  # where what its conversation shares with others ends; 0: it shares nothing
    end: int


@dataclass(frozen=True)
class Wish:
    """What a request's hint, and prompts before it, say of it at first sight. Positions and lengths in tokens."""

    hinted_positions: tuple[int, ...] = ()  # usable positions of its hint, ascending
    hinted: bool = False  # it came with a hint, usable or not
    resolved: tuple[int, ...] = ()  # what each entry of its hint names, in the hint's order, exact; 0: not there
    turn_end: int = 0  # usable position that its hint counts from the prompt's end; 0: none
    shared: int = 0  # its hashes match those of a prompt seen before up to here, whole match units
    learned: int = 0  # the position that follows from `shared`; 0: none, or a hinted one serves
    expected: tuple[int, ...] = ()  # where later prompts are likely to leave it, ascending
    goes_on_from: TurnEnd | None = None  # the last turn of an earlier prompt that it contains
    worthless_turn: int = 0  # the end of its turn, if nobody is going to come back to it
    left_to_vllm: bool = False  # no state of it is kept, and vLLM caches it as it does alone
    trial: bool = False  # hints beside drafts are tried by it: its states are kept, whatever a hit would be worth
    pin: bool | None = None  # its prompt is to be pinned, or released; None: neither

    @property
    def positions(self) -> tuple[int, ...]:
        """Positions of which a state is wanted because others share them, ascending."""
        if not self.learned:
            return self.hinted_positions
        return tuple(sorted((*self.hinted_positions, self.learned)))


@dataclass(slots=True)
class RequestState:
    """How far a request has come. Positions and lengths in tokens."""

    wish: Wish = Wish()
    begun: bool = False  # it was admitted before
    prompt_tokens: int = 0  # of its prompt as it came, if only its beginning is computed here; 0: all of it is
    loaded: int = 0  # tokens that another worker has computed, and that are loaded
    resumed_at: int = 0  # its state was found there when it was admitted
    chunk_start: int = 0  # where its running chunk begins
    last_edge: int = 0  # the last block's edge before which a draft head's rows were kept
    drafts_from: int = 0  # the token from which a draft head's rows in its window are no zeros
    window: str = ""  # what its hit found of a draft head's window; "": there is none, or no hit
    heals: int = 0  # the hit that it was given up for that window; 0: none
    draft_steps: int = 0  # in which its drafts were verified
    accepted: int = 0  # drafts that were right
    states: set[int] = field(default_factory=set)  # positions of its states, to which keys of its rows have to lead
    reported_to: int = 0  # its states up to here are in the events
    not_held: bool = False  # counted as a follower for which waiting did not pay
    gave_up_on: str | None = None  # id of the leader it has waited for long enough
    upstream_junction: int = 0  # the shared prefix that vLLM itself found
    own_junction: int = -1  # what `end_chunk` last wrote over it
