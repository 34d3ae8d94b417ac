"""The states of one scheduler: which are wanted, where they go, and which requests resume from them.

`Checkpoints` ties the parts of this room together. It lives in the scheduler's process, on its one thread.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from engine_patches.forward.loaded_weights import Weights
from engine_patches.scheduler import hints
from engine_patches.scheduler.adapters import adapter_name, is_alone
from engine_patches.scheduler.cache_keys import key_at
from engine_patches.scheduler.counters import AdmittedRequest, Counters
from engine_patches.scheduler.expected_junctions import ExpectedJunctions
from engine_patches.scheduler.fan_out import PrefillGate
from engine_patches.scheduler.grid import Grid
from engine_patches.scheduler.held_keys import HeldKeys
from engine_patches.scheduler.hints import (
    EDGE,
    EXPECTED,
    LEARNED,
    NEAR_UNITS,
    TAIL,
    TURN_REACH,
    CheckpointTarget,
    checkpoint_targets,
)
from engine_patches.scheduler.pins import NOT_CACHED, PINNED, Pins
from engine_patches.scheduler.reasons import EVICTED, HIT, NOT_WORTH_IT, Outcomes
from engine_patches.scheduler.refusals import Refusal
from engine_patches.scheduler.request_state import RequestState
from engine_patches.scheduler.retention import Retention
from engine_patches.scheduler.seen import SeenPrefixes
from engine_patches.scheduler.state_events import StateEvents
from engine_patches.scheduler.step_time import StepTime
from engine_patches.scheduler.turn_value import TurnValue

# A hit below this share of a pass is not felt, and its state takes as much room as any other.
WORTH_OF_A_PASS = 0.05

# Name of the head that chats without a system prompt have in common, for each cache salt.
HEADLESS = b"headless "

# Tokens that two prompts have to share before the engine by itself keeps a state where they part.
MIN_SHARED = 128

# States whose bytes are counted, and hits on them; an older one is forgotten. Real caches hold some hundreds.
MAX_WRITTEN = 65_536


class StateStore(Protocol):
    """What keeps states beyond the cache."""

    def offer(self, request: Any, position: int, used: bool = True) -> None:
        """The request's state at `position` (tokens) is cached; `used`: a request resumed from it, or it is pinned."""

    def close(self, why: str) -> None:
        """Hold no block that is not being copied, and find nothing any more. `why`: half a sentence for the log."""


@dataclass
class Checkpoints:
    """Lengths in tokens."""

    grid: Grid
    block_size: int
    enabled: bool = False  # the model has recurrent layers, and their states can be found
    writes_in_forward: bool = False  # states are written inside a pass; if not, chunks are cut for them
    refusal: Refusal | None = None  # why the hints of all requests are ignored
    block_sizes: dict[int, int] = field(default_factory=dict)  # by recurrent cache group
    attention_managers: Sequence[Any] = ()
    verified: int = 1  # of one request in a step of generation, at most: itself and its drafts
    counters: Counters = field(default_factory=Counters)
    step_time: StepTime = field(default_factory=StepTime)
    gate: PrefillGate | None = None  # holds followers back; None if fan-out is switched off
    retention: Retention | None = None  # None if vLLM keeps the states
    keys: HeldKeys | None = None  # None without states, as the next two
    state_events: StateEvents | None = None
    pins: Pins | None = None
    store: StateStore | None = None  # None without a directory for checkpoints
    weights: Weights = field(default_factory=Weights)  # that states are computed with
    pinning: set[str] = field(default_factory=set)  # requests that pin their prompts, or release them
    unwritten: dict[int, int] = field(default_factory=dict)  # attention block -> token from which the step fills it
    state_bytes: int = 0  # of one state, all recurrent layers
    give_back: Callable[[list[Any]], None] | None = None  # frees blocks of states; None: the pool does, at once
    _held: list[Any] = field(default_factory=list)  # blocks written in the running step

    def __post_init__(self) -> None:
        self.outcomes = Outcomes(self.grid)
        self.seen = SeenPrefixes()
        self.turn_value = TurnValue()
        self.expected_junctions = ExpectedJunctions()
        self._written = self.keys.watch() if self.keys is not None else None  # those that were counted

    @property
    def recurrent_groups(self) -> Iterable[int]:
        """Cache groups that need a block for every state."""
        return self.block_sizes

    @property
    def recurrent_group(self) -> int:
        """The cache group whose keys stand for all recurrent groups."""
        return next(iter(self.block_sizes))

    def state_of(self, request: Any) -> RequestState:
        """What is known of a vLLM `Request`. Its hint is parsed by the first call."""
        try:
            state: RequestState = request.seamark
        except AttributeError:
            request.seamark = state = self._first_state_of(request)
        return state

    def _first_state_of(self, request: Any) -> RequestState:
        hint = hints.hint_in(request)
        state = RequestState(hinted=hint is not hints.NONE)
        refusal = "adapter" if is_alone(request) else self.refusal.reason if self.refusal is not None else None
        if state.hinted and refusal is not None:
            self.counters.hint_ignored(refusal)
        if not self.enabled:
            return state
        state.pin = hints.pin_in(request)
        if state.pin is not None:
            self.pinning.add(request.request_id)
        ignore = self.counters.hint_ignored
        if state.hinted and refusal is None:
            state.resolved = hints.resolve(hint, request.prompt_token_ids, request.num_prompt_tokens, ignore)
            state.hinted_positions = hints.usable_positions(state.resolved, self.grid, ignore)
            state.turn_end = self.grid.usable(hints.turn_end(hint, state.resolved))
        # Of a prompt that goes on arriving, only what is there now is looked up and remembered.
        units = request.num_prompt_tokens // self.grid.unit
        state.shared = self.seen.deepest(request.block_hashes[:units]) * self.grid.unit
        state.learned = self._learned_position(request, state)
        if self.writes_in_forward:  # else each costs a pass
            places = self.expected_junctions.places(_salt_of(request), state.shared, request.num_prompt_tokens)
            state.expected = tuple(self.grid.deliverable(place, request.num_prompt_tokens) for place in places)
        state.worthless_turn = self._worthless_turn(request, state)
        return state

    def _worthless_turn(self, request: Any, state: RequestState) -> int:
        """The end of a request's turn if nobody is going to come back to it; 0 if somebody may."""
        hashes, units = request.block_hashes, state.shared // self.grid.unit
        # The end of the turn before is as far from what is shared as a hint may be, and rounded down to the alignment.
        reach = math.ceil((TURN_REACH + self.grid.alignment + self.grid.ahead) / self.grid.unit)
        self.turn_value.came_back(hashes[max(units - reach, 0) : units])
        targets = [target for target in self.targets(request, state) if target.kind != EXPECTED]
        if not targets or state.pin:
            return 0
        end = targets[-1].position
        if end > len(hashes) * self.grid.unit:
            return 0
        heads = [position for position in state.positions if position < end - TURN_REACH]
        if heads and self._ends_a_turn(state, targets[-1]):
            start, head = heads[0], self.grid.hash_of(request, heads[0])
        elif state.positions == (end,) == (state.turn_end,):
            start, head = 0, HEADLESS + _salt_of(request)
        else:
            return 0
        key = self.grid.hash_of(request, end)
        if self.turn_value.worth_a_state(head, key, end - start, self.step_time.tokens_per_pass):
            return 0
        if end in state.hinted_positions:
            self.counters.hint_ignored(NOT_WORTH_IT)
        self.outcomes.computed(request, end, NOT_WORTH_IT)
        return end

    def _learned_position(self, request: Any, state: RequestState) -> int:
        """Where a request leaves the prompts before it, if that is worth a state and none of its hint serves."""
        tail: int = (request.num_prompt_tokens - 1) // self.grid.unit * self.grid.unit
        shared = min(state.shared, tail)  # the same prompt again can use no more
        hinted_there = any(shared <= position < shared + NEAR_UNITS * self.grid.unit for position in state.resolved)
        position = self.grid.deliverable(state.shared, request.num_prompt_tokens)
        if shared < max(MIN_SHARED, self.grid.alignment) or hinted_there or position in state.hinted_positions:
            return 0
        return position

    def targets(self, request: Any, state: RequestState | None = None) -> list[CheckpointTarget]:
        """Positions of a request whose states are to be kept, ascending."""
        state = state or self.state_of(request)
        if is_alone(request):
            return []
        wanted = checkpoint_targets(
            request,
            state.hinted_positions,
            self.grid,
            self.block_size,
            state.learned,
            state.expected,
            state.prompt_tokens,
        )
        return [target for target in wanted if target.position != state.worthless_turn]

    def is_cached(self, request: Any, position: int) -> bool:
        """Whether a request's state at `position` is in the cache, in every recurrent group."""
        return self.keys is not None and self.keys.is_cached(request, position)

    def state_written(self, key: bytes, kind: str) -> None:
        """A state of a kind was registered under `key`."""
        self.counters.state_written(kind)
        if self._written is not None:
            self._written.add(key, (key,))
            self._written.remove_oldest(MAX_WRITTEN)

    @property
    def bytes_held(self) -> int:
        """Bytes of the counted states that are still cached."""
        if self._written is None:
            return 0
        self._written.lost()
        return len(self._written) * self.state_bytes

    def positions_with_keys(self, state: RequestState, manager: Any, num_tokens: int) -> list[int]:
        """Positions up to `num_tokens` at which the request's blocks in an attention manager carry keys of ours."""
        drop = self.grid.drop_in(manager)
        positions = state.states if self.writes_in_forward else state.positions
        return [position + drop for position in positions if position + drop <= num_tokens]

    def begin_step(self, pool: Any, requests: Container[str]) -> None:
        """A step is going to be planned; `requests` are alive."""
        self.release(pool)
        self.unwritten.clear()
        if self.gate is not None:
            self.gate.drop_gone(requests)

    def release(self, pool: Any) -> None:
        """Make the blocks of the last step's states cache like any other.

        That step may still run. Workers run steps in order, so the next owner of such a block writes after it; only
        what a KV connector loads comes in no such order, and `give_back` waits for the step if there may be one.
        """
        if self._held:
            held, self._held = self._held, []
            (self.give_back or pool.free_blocks)(held)

    def expect_states(self, request: Any, start: int) -> None:
        """A request is going to be computed from token `start`: requests that share its prefix may wait for it."""
        if self.gate is not None:
            self.gate.expect(request, start, (target.position for target in self.targets(request)))

    def worth_writing(self, state: RequestState, target: CheckpointTarget) -> bool:
        """Whether a hit at a target of a request would be felt: more than a small part of a pass.

        Of a learned one that is what it adds to the state that the request itself resumed from: the next turn of a
        conversation also repeats the first words of the template's answer, a few tokens behind the last turn's state.
        """
        saved = target.position - (state.resumed_at if target.kind == LEARNED else 0)
        return saved >= self.step_time.tokens_per_pass * WORTH_OF_A_PASS or not self.step_time.known

    def reserve(self, pool: Any, request: Any, target: CheckpointTarget) -> list[Any] | None:
        """Blocks for a state that this step writes, one per recurrent group, registered under the position's keys.

        None if the cache has none to spare.
        """
        groups = list(self.block_sizes.items())
        if pool.get_num_free_blocks() < len(groups):
            return None
        if self.retention is not None and not self.retention.make_room(len(groups)):
            return None
        blocks: list[Any] = pool.get_new_blocks(len(groups))
        self._held += blocks
        for (group, block_size), block in zip(groups, blocks, strict=True):
            pool.cache_partial_block(
                request=request,
                block=block,
                num_tokens=target.position,
                kv_cache_group_id=group,
                block_size=block_size,
                replace_existing_hashes=True,  # it has none; vLLM 0.31 requires the argument at a block's edge
            )
        key = blocks[0].block_hash
        self.state_written(key, target.kind)
        if target.kind == EXPECTED:
            self.expected_junctions.written(key)
        if self.retention is not None:
            self.retention.add(key, blocks, self._ends_a_turn(self.state_of(request), target))
        return blocks

    def _ends_a_turn(self, state: RequestState, target: CheckpointTarget) -> bool:
        """Whether a state serves one conversation, rather than whoever shares its prefix, as far as is known."""
        if target.kind == LEARNED:
            # Just behind a state: more likely the template's own words after a turn than what others share.
            return state.resumed_at > 0 and target.position - state.resumed_at <= NEAR_UNITS * self.grid.unit
        hinted = state.hinted_positions
        return target.kind in (TAIL, EDGE, EXPECTED) or (len(hinted) > 1 and target.position == hinted[-1])

    def pin_prompts(self, requests: Mapping[str, Any]) -> None:
        """A step is planned to its end: pin, or release, the prompts computed with it whose requests ask for that.

        `requests`: those alive, by id.
        """
        for name in list(self.pinning):
            request = requests.get(name)
            # vLLM has counted the step's tokens already.
            if request is None or request.num_computed_tokens >= request.num_prompt_tokens:
                self.pinning.discard(name)
                if request is not None:
                    self.counters.prompt_pinned(name, self._pin(request))

    def _pin(self, request: Any) -> str:
        pins, held = self.pins, self.keys
        if pins is None or held is None or request.num_prompt_tokens < self.grid.unit:
            return NOT_CACHED
        prompt = self.grid.hash_of(request, request.num_prompt_tokens)
        state = self.state_of(request)
        if not state.pin:
            return pins.release(prompt)
        # Sent again, it leaves the prompts before it at its own end: a state there serves the same prompt alone.
        wanted = state.hinted_positions or [target.position for target in self.targets(request)]
        found = {position: held.found(request, position) for position in wanted}
        fate = pins.pin(prompt, itertools.chain(*found.values()), adapter_name(request))
        if fate == PINNED and self.store is not None:
            for position in filter(found.get, found):
                self.store.offer(request, position)
        return fate

    def admitted(self, request: Any, hit_tokens: int, loaded: int = 0) -> None:
        """A request starts with `hit_tokens`, 0 for none; the last `loaded` of them do not come from the cache."""
        state = self.state_of(request)
        state.resumed_at = max(hit_tokens, state.loaded)
        if state.loaded > hit_tokens:  # another worker has spared it the rest, and counts what that spared
            self.counters.request_admitted(
                AdmittedRequest(request.request_id, HIT, state.loaded, state.shared, state.resolved)
            )
            return
        reason = self.outcomes.reason_for(request, state, hit_tokens)
        shared = self.grid.shared(state.shared)
        self.counters.request_admitted(AdmittedRequest(request.request_id, reason, hit_tokens, shared, state.resolved))
        key = key_at(request, hit_tokens, self.grid.unit, self.recurrent_group) if hit_tokens else b""
        was_expected = self.expected_junctions.is_expected(key)
        self._learn_junction(request, state, reason, was_expected=was_expected)
        if not hit_tokens:
            return
        counted = bool(loaded) or (self._written is not None and key in self._written)
        self.counters.resumed(hit_tokens, self.step_time.seconds(hit_tokens), counted)
        if self.store is not None and not loaded:
            self.store.offer(request, hit_tokens)
        if self.retention is not None:
            self.retention.resumed(key, shared=was_expected)
            passed = (position for position in state.positions if position < hit_tokens)
            self.retention.refresh(key_at(request, p, self.grid.unit, self.recurrent_group) for p in passed)

    def _learn_junction(self, request: Any, state: RequestState, reason: str, *, was_expected: bool) -> None:
        """Whether a state at first sight would have helped an admitted request; `was_expected`: it did."""
        if state.begun:
            return
        state.begun = True
        resumed = state.resumed_at
        if was_expected:
            resumed = max((position for position in state.hinted_positions if position < resumed), default=0)
        # What was evicted was there, and would have been evicted at any other place, too.
        leaves = state.shared >= max(MIN_SHARED, self.grid.alignment) and reason != EVICTED
        junction = self.grid.hash_of(request, state.shared) if leaves else None
        length, rate = request.num_prompt_tokens, self.step_time.tokens_per_pass
        self.expected_junctions.add(_salt_of(request), junction, state.shared, length, resumed, rate)

    def weights_may_change(self) -> None:
        """From now on states may be of other weights than those that were loaded at the start."""
        if self.weights.name:
            self.weights = Weights(unknown="they may have been changed since the start")
        if self.store is not None:
            self.store.close(self.weights.unknown)

    def adapter_replaced(self, name: str) -> None:
        """The LoRA adapter `name` has other contents from now on: nothing that it left in the cache can be found."""
        if self.pins is not None:
            self.pins.release_adapter(name)
        if self.state_events is not None:
            self.state_events.adapter_replaced(name)

    def before_reset(self, pool: Any) -> None:
        """The cache is going to be emptied, which may be for weights that were changed in place."""
        self.release(pool)
        if self.store is not None:
            self.store.close("the cache is emptied")
        if self.retention is not None:
            self.retention.clear()
        if self.gate is not None:
            self.gate.clear()


def _salt_of(request: Any) -> bytes:
    """What keeps the prompts of some apart from those of others."""
    return str(getattr(request, "cache_salt", None)).encode(errors="surrogatepass")
