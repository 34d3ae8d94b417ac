"""What one scheduler does with states: which are wanted of a request, what is told of it, and what is learnt from it.

`Checkpoints` hangs on vLLM's scheduler as `scheduler.seamark`, with the parts of this room. All of it lives on the
scheduler's one thread.
"""

from __future__ import annotations

import math
from collections.abc import Container, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from engine_patches.forward.loaded_weights import Weights
from engine_patches.scheduler import earlier_prompts, hints, planner
from engine_patches.scheduler.adapters import is_alone
from engine_patches.scheduler.counters import AdmittedRequest, Counters
from engine_patches.scheduler.draft_windows import HEALED, ZEROED
from engine_patches.scheduler.drafts import AcceptedDrafts, DraftGate, is_own, is_trial
from engine_patches.scheduler.earlier_prompts import ExpectedJunctions, LadderUse, Outcomes, SeenPrefixes, TurnValue
from engine_patches.scheduler.fan_out import PrefillGate
from engine_patches.scheduler.long_prefills import LongPrefills
from engine_patches.scheduler.planner import CheckpointTarget, Grid, Planner, RequestState, TurnEnd, Wish
from engine_patches.scheduler.refusals import SPECULATIVE, Refusal
from engine_patches.scheduler.retention import LowBlocks
from engine_patches.scheduler.states import States
from engine_patches.scheduler.step_time import StepTime

# Name of the head that chats without a system prompt have in common, for each cache salt.
HEADLESS = b"headless "


@dataclass
class Checkpoints:
    """Lengths in tokens."""

    grid: Grid
    block_size: int
    states: States | None = None  # None if the model has no recurrent layers, or their states cannot be found
    refusal: Refusal | None = None  # why the hints of all requests are ignored
    weights: Weights = field(default_factory=Weights)  # that states are computed with
    verified: int = 1  # of one request in a step of generation, at most: itself and its drafts
    drafts: DraftGate = field(default_factory=DraftGate)  # whether hints are used beside them
    own: Any = None  # `trial.own_requests.OwnRequests`, while the engine tries them
    gate: PrefillGate | None = None  # holds followers back; None if fan-out is switched off
    counters: Counters = field(default_factory=Counters)
    step_time: StepTime = field(default_factory=StepTime)
    long_prefills: LongPrefills = field(default_factory=LongPrefills)
    low: LowBlocks | None = None  # what goes first; None before the scheduler is whole
    pinning: set[str] = field(default_factory=set)  # requests that pin their prompts, or release them
    last_planned: Any = None  # vLLM's `SchedulerOutput` of the step that was planned last
    step_ended: float = 0.0  # when the output of a step came last, by the monotonic clock

    def __post_init__(self) -> None:
        self.planner = Planner(self.grid, self.block_size)
        self.outcomes = Outcomes(self.grid)
        self.seen = SeenPrefixes()
        self.turn_value = TurnValue()
        self.expected_junctions = ExpectedJunctions()
        self.ladder = LadderUse()

    @property
    def writes_in_forward(self) -> bool:
        """Whether states are written inside a pass; if not, chunks are cut for them."""
        return self.states is not None and self.states.in_pass

    def state_of(self, request: Any) -> RequestState:
        """What is known of a vLLM `Request`. Its hint is parsed by the first call."""
        try:
            state: RequestState = request.seamark
        except AttributeError:
            request.seamark = state = RequestState(self._wish_of(request))
        return state

    def _wish_of(self, request: Any) -> Wish:
        hint, ignore = hints.hint_in(request), self.counters.hint_ignored
        hinted, refusal = hint is not hints.NONE, None  # why its hint is ignored
        if (keep := hints.keep_in(request)) in (hints.NO, hints.PRIVATE):
            return Wish(hinted=hinted, left_to_vllm=True, is_kept=False)
        if is_alone(request):
            refusal = "adapter"
        elif self.states is None:
            refusal = self.refusal.reason if self.refusal is not None else None
        elif not self.drafts.admits(request):
            refusal = SPECULATIVE
        if hinted and refusal is not None:
            ignore(refusal)
        if self.states is None or refusal == SPECULATIVE:
            return Wish(hinted=hinted, left_to_vllm=True)
        if (pin := hints.pin_in(request)) is not None:
            self.pinning.add(request.request_id)
        # Of a prompt that goes on arriving, only what is there now is looked up and remembered.
        tokens, unit, is_used = request.num_prompt_tokens, self.grid.unit, hinted and refusal is None
        resolved = hints.resolve(hint, request.prompt_token_ids, tokens, ignore) if is_used else ()
        shared = self.seen.deepest(request.block_hashes[: tokens // unit]) * unit
        # Where states are not written inside a pass, each costs one.
        places = self.expected_junctions.places(_salt_of(request), shared, tokens) if self.writes_in_forward else ()
        # An earlier turn ends as far from what is shared as a hint may be, and rounded down to the alignment.
        reach = math.ceil((planner.TURN_REACH + self.grid.alignment + self.grid.ahead) / unit)
        earlier = self.turn_value.came_back(request.block_hashes[max(shared // unit - reach, 0) : shared // unit])
        known = {"hinted": hinted, "pin": pin, "trial": is_trial(request), "goes_on_from": earlier}
        known["is_low"] = keep == hints.LOW
        wish = self.planner.wish(hint, resolved, tokens, shared, places, ignore, **known)
        return replace(wish, worthless_turn=self._worthless_turn(request, wish))

    def _worthless_turn(self, request: Any, wish: Wish) -> int:
        """The end of a request's turn if nobody is going to come back to it; 0 if somebody may."""
        turn = None if wish.pin or wish.trial or is_alone(request) else self.planner.last_turn(wish, request)
        if turn is None or turn.end > len(request.block_hashes) * self.grid.unit:
            return 0
        head = self.grid.hash_of(request, turn.start) if turn.start else HEADLESS + _salt_of(request)
        key = self.grid.hash_of(request, turn.end)
        if wish.goes_on_from is not None:  # the conversation began where its first turn did
            turn = TurnEnd(wish.goes_on_from.start, turn.end)
        if self.turn_value.worth_a_state(head, key, turn, self.step_time.tokens_worth(states=1)):
            return 0
        if turn.end in wish.hinted_positions:
            self.counters.hint_ignored(earlier_prompts.NOT_WORTH_IT)
        self.outcomes.computed(request, turn.end, earlier_prompts.NOT_WORTH_IT)
        return turn.end

    def targets(self, request: Any) -> list[CheckpointTarget]:
        """Positions of a request whose states are to be kept, ascending."""
        state = self.state_of(request)
        if is_alone(request) or state.wish.left_to_vllm:
            return []
        return self.planner.targets(state.wish, request, state.prompt_tokens)

    def targets_in(self, request: Any, start: int, end: int) -> list[CheckpointTarget]:
        """Those at positions in (start, end], a chunk of the prompt, then spare ones if these are of use."""
        targets, state = self.targets(request), self.state_of(request)
        wanted = [target for target in targets if start < target.position <= end]
        if end - start <= self.verified or is_alone(request) or state.wish.left_to_vllm:
            return wanted
        tokens, felt = state.prompt_tokens or request.num_prompt_tokens, self._felt()
        resumable = self.grid.resumable(tokens)
        positions = [state.resumed_at, *(target.position for target in targets)]
        is_free = targets and not state.wish.worthless_turn and self._felt(states=1) <= 2 * felt
        if is_free and (edge := self.planner.spare(start, end, resumable, positions, felt)):
            wanted.append(CheckpointTarget(edge, planner.SPARE))
            positions.append(edge)
        rungs = 0 if is_own(request) else self.ladder.rungs(tokens - state.resumed_at, self.step_time)
        if self.states is not None and not self.states.has_idle(rungs, rungs=True):
            rungs = min(rungs, planner.FEW_RUNGS)
        places = self.planner.ladder(self.grid.floor(resumable), positions, felt, rungs)
        return wanted + [CheckpointTarget(place, planner.RUNG) for place in places if start < place <= end]

    def worth_writing(self, state: RequestState, target: CheckpointTarget) -> bool:
        """Whether a hit at a target of a request would be felt beyond what its state costs, as far as is known."""
        is_asked_for = bool(state.wish.pin or state.wish.trial)
        saved = self.planner.saved(target, 0 if state.on_rung else state.resumed_at)
        return is_asked_for or saved >= self._felt(states=1)

    def _felt(self, states: int = 0) -> float:
        """Tokens from which on it is felt that they are spared, at the price of so many states; 0 while unknown."""
        return self.step_time.tokens_worth(planner.WORTH_OF_A_PASS, states) if self.step_time.known else 0.0

    def begin_step(self, requests: Container[str]) -> None:
        """A step is going to be planned; `requests` are alive."""
        if self.low is not None:
            self.low.give_way()
        if self.states is not None:
            self.states.begin_step()
        if self.gate is not None:
            self.gate.drop_gone(requests)

    def expect_states(self, request: Any, start: int) -> None:
        """A request is going to be computed from token `start`: requests that share its prefix may wait for it."""
        if self.gate is not None:
            state = self.state_of(request)
            start = max(start, state.heals)  # up to there states are held, and rows alone are missing
            likely = (target for target in self.targets(request) if self.finds_room(request, target))
            self.gate.expect(request, start, (target.position for target in likely))

    def finds_room(self, request: Any, target: CheckpointTarget) -> bool:
        """Whether a request's state at a target is likely to be written, by what the cache holds now."""
        is_spare = self.planner.is_spare(self.state_of(request).wish, target)
        return not is_spare or (self.states is not None and self.states.has_idle())

    def reserve(self, request: Any, target: CheckpointTarget) -> list[Any] | None:
        """Blocks for a state that this step writes, one per recurrent group; None if the cache has none to spare."""
        if self.states is None:
            return None
        state = self.state_of(request)
        wish, before = state.wish, state.wish.goes_on_from
        own = before is not None and target.position > before.start
        turn = own or self.planner.ends_a_turn(wish, target, state.resumed_at)
        spare = self.planner.is_spare(wish, target)
        rung = target.kind == planner.RUNG or (target.kind == planner.SPARE and not self.states.has_idle())
        blocks = self.states.reserve(request, target.position, turn, spare=spare, rung=rung, low=wish.is_low)
        if blocks is not None:
            self.state_written(request, blocks[0].block_hash, target.kind)
            if before is not None and target.position == wish.turn_end:
                self.states.continued(request, target.position, before.end, wish.positions)
        return blocks

    def state_written(self, request: Any, key: bytes, kind: str) -> None:
        """A state of a kind was registered under `key`; those of own requests are not counted."""
        if is_own(request):
            return
        self.counters.counts.written[kind] += 1
        if self.states is not None:
            self.states.add_written(key)
        if kind == planner.EXPECTED:
            self.expected_junctions.written[key] = None

    def pin_prompts(self, requests: Mapping[str, Any]) -> None:
        """A step is planned to its end: pin, or release, the prompts computed with it whose requests ask for that."""
        for name in list(self.pinning):
            request = requests.get(name)
            # vLLM has counted the step's tokens already.
            if request is None or request.num_computed_tokens >= request.num_prompt_tokens:
                self.pinning.discard(name)
                if request is not None and self.states is not None:
                    wish = self.state_of(request).wish
                    # Sent again, it leaves those before it at its own end: a state there serves the same prompt alone.
                    wanted = wish.hinted_positions or [target.position for target in self.targets(request)]
                    fate = self.states.pin(request, wanted) if wish.pin else self.states.unpin(request)
                    self.counters.prompt_pinned(name, fate)

    def admitted(self, request: Any, hit_tokens: int, loaded: int = 0) -> None:
        """A request starts with `hit_tokens`, 0 for none; the last `loaded` of them do not come from the cache."""
        state, name, states, counts = self.state_of(request), request.request_id, self.states, self.counters.counts
        wish, counted = state.wish, not is_own(request)
        state.resumed_at = max(hit_tokens, state.loaded)
        if state.loaded > hit_tokens:  # another worker has spared it the rest, and counts what that spared
            hit = AdmittedRequest(name, earlier_prompts.HIT, state.loaded, wish.shared, wish.resolved)
            self.counters.request_admitted(hit)
            return
        reason = self.outcomes.reason_for(request, wish, hit_tokens)
        if state.window:
            if counted:
                counts.windows[state.window] += 1
            if states is not None and states.windows is not None:
                states.windows.admitted(state, states.keys.state_key(request, state.heals or hit_tokens))
        if state.window == HEALED and hit_tokens < state.heals:
            reason = earlier_prompts.NOT_WORTH_IT
        if counted:
            shared = self.grid.shared(wish.shared)
            self.counters.request_admitted(AdmittedRequest(name, reason, hit_tokens, shared, wish.resolved))
        key = states.keys.state_key(request, hit_tokens) if hit_tokens and states is not None else b""
        was_expected = key in self.expected_junctions.written
        state.on_rung = states is not None and states.retention.is_rung(key)
        self._learn_junction(request, state, reason, was_expected=was_expected)
        if states is not None and key:
            if counted:
                counts.saved_seconds += self.step_time.seconds(hit_tokens)
            if counted and (loaded or key in states.written):
                counts.hits += 1
                counts.hit_tokens += hit_tokens
            if hit_tokens in wish.positions:
                states.retention.claim(key)
            passed = [position for position in wish.positions if position < hit_tokens]
            stored = not loaded and wish.is_kept  # nothing is stored for what it is worth to one that is not kept
            states.resumed(request, hit_tokens, passed, shared=was_expected, stored=stored, low=wish.is_low)

    def _learn_junction(self, request: Any, state: RequestState, reason: str, *, was_expected: bool) -> None:
        """Whether a state at first sight would have helped an admitted request; `was_expected`: it did."""
        if state.begun or state.wish.left_to_vllm or is_own(request):
            return
        state.begun = True
        resumed, shared = state.resumed_at, state.wish.shared
        if was_expected or state.on_rung:
            resumed = max((position for position in state.wish.hinted_positions if position < resumed), default=0)
        # What was evicted was there, and would have been evicted at any other place, too.
        leaves = self.planner.is_worth_learning(shared) and reason != earlier_prompts.EVICTED
        lacking = shared - state.resumed_at if leaves else 0
        self.ladder.admitted(request.num_prompt_tokens - state.resumed_at, lacking, is_used=state.on_rung)
        junction = self.grid.hash_of(request, shared) if leaves else None
        length, cost = request.num_prompt_tokens, self.step_time.tokens_worth(states=1)
        self.expected_junctions.add(_salt_of(request), junction, shared, length, resumed, cost)

    def finished(self, request: Any) -> None:
        """A request has its whole answer."""
        state = self.state_of(request)
        if state.draft_steps and self.states is not None and self.states.windows is not None:
            self.states.windows.acceptance.add(state.window != ZEROED, state.draft_steps, state.accepted)
        if state.draft_steps and not is_own(request):
            self.drafts.count(AcceptedDrafts(state.draft_steps, state.accepted), is_hit=state.resumed_at > 0)

    def weights_may_change(self) -> None:
        """From now on states may be of other weights than those that were loaded at the start."""
        if self.own is not None:
            self.own.give_up()
        if self.weights.name:
            self.weights = Weights(unknown="they may have been changed since the start")
        if self.states is not None and self.states.store is not None:
            self.states.store.close(self.weights.unknown)

    def before_reset(self) -> None:
        """The cache is going to be emptied, which may be for weights that were changed in place."""
        if self.own is not None:
            self.own.give_up()
        if (states := self.states) is not None:
            states.release()
            states.retention.clear()
            if states.store is not None:
                states.store.close("the cache is emptied")
            if states.windows is not None:
                states.windows.clear()
        if self.gate is not None:
            self.gate.clear()


def _salt_of(request: Any) -> bytes:
    """What keeps the prompts of some apart from those of others."""
    return str(getattr(request, "cache_salt", None)).encode(errors="surrogatepass")
