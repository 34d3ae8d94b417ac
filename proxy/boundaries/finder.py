"""Boundaries of a chat: the token positions worth a checkpoint, remembered under canonical keys.

A boundary is found by rendering once. From then on it is known for every request that starts alike.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from proxy.boundaries.boundary import Boundary, Found, Result
from proxy.boundaries.candidates import (
    Candidate,
    Kind,
    PromptLayout,
    cut_candidate,
    cut_key,
    history_candidate,
    layout_of,
    marked_candidate,
    system_candidate,
    turn_candidate,
    user_candidate,
    user_key,
)
from proxy.boundaries.learned import DivergenceLearner, SharedText
from proxy.boundaries.local_renderer import VerifiedRenderer
from proxy.boundaries.measure import Measurement, TemplateFacts
from proxy.boundaries.positions import Position, PositionCache
from proxy.boundaries.renderer import Renderer, RenderFailed
from proxy.chat.chat import Chat

# On an otherwise known prompt, a new last text of this size is worth a render of its own, so that the next turn finds
# its end: some thousand tokens, more than the pass that a checkpoint can cost. vLLM's own stop near the prompt's end
# serves shorter ones.
LONG_TEXT_CHARACTERS = 4096

# Marks of one request that count; the APIs that have them allow four.
MAX_MARKS = 8


class BoundaryFinder:
    """Finds boundaries through a renderer, and remembers them. One per gateway."""

    def __init__(
        self, positions: PositionCache, learner: DivergenceLearner | None = None, facts: TemplateFacts | None = None
    ) -> None:
        """Without a `learner` only boundaries between messages, and those that a client marks, are found."""
        self._positions = positions
        self._learner = learner
        self._facts = facts if facts is not None else TemplateFacts()
        self._pending: dict[bytes, asyncio.Future[None]] = {}

    async def find(self, chat: Chat | None, renderer: Renderer, renderer_id: bytes) -> Found:
        """Boundaries of a chat. Never raises for what a client or a template does: `failure` says why not.

        `renderer_id` stands for tokenizer and template; positions of one do not serve another.
        """
        layout = layout_of(chat, renderer_id) if chat is not None else None
        if layout is None:
            return Found(failure="no_boundary")
        shared = self._shared_texts(layout)
        marks = layout.chat.marks[:MAX_MARKS]
        marked = [candidate for mark in marks if (candidate := marked_candidate(layout, mark)) is not None]
        if not (wanted := self._unknown(layout, marked, shared, renderer)):
            return self._found(layout, marked, shared, "memo")
        pending = self._pending.get(layout.key)
        if pending is not None and self._positions.get(layout.key) is None:
            # Someone is rendering this very prefix: a cold fan-out costs one set of renders.
            await asyncio.wait((pending,))
            if not (wanted := self._unknown(layout, marked, shared, renderer)):
                return self._found(layout, marked, shared, "memo")
        done = asyncio.get_running_loop().create_future()
        self._pending[layout.key] = done
        measure = Measurement(layout, renderer, renderer_id, self._facts)
        odd: list[tuple[Candidate, Position]] = []
        try:
            for candidate, here, always in await measure.positions(wanted):
                self._positions.put(candidate.key, always)
                if here != always:
                    odd.append((candidate, here))
        except RenderFailed:
            found = self._found(layout, marked, shared, "memo", measure)
            if found.boundaries:  # only what would have been new is missing
                return found
            return Found(
                prefixes=found.prefixes,
                failure="render_failed",
                key=layout.key,
                layout=layout,
                renders=measure.renders,
            )
        finally:
            if self._pending.get(layout.key) is done:
                del self._pending[layout.key]
            done.set_result(None)
        result: Result = "local" if measure.local else "render"
        return self._found(layout, marked, shared, result, measure, odd)

    def _shared_texts(self, layout: PromptLayout) -> list[tuple[int, SharedText]]:
        """Beginnings of texts after which recent requests diverged, each with the index of its message."""
        if self._learner is None:
            return []
        # In a known chat a deeper boundary lies behind everything before the last text.
        return self._learner.shared_texts(layout, layout.last if self._positions.get(layout.key) is not None else 0)

    def _unknown(
        self,
        layout: PromptLayout,
        marked: Sequence[Candidate],
        shared: Sequence[tuple[int, SharedText]],
        renderer: Renderer,
    ) -> list[Candidate]:
        """Candidates whose position has to be measured before this request goes on; none on a known path."""
        known = layout.chat.is_bare or self._positions.get(layout.key) is not None
        wanted: list[Candidate] = []
        if not known:
            candidates = (history_candidate(layout), system_candidate(layout), user_candidate(layout))
            wanted += [each for each in candidates if each is not None and self._positions.get(each.key) is None]
        if self._deserves_turn(layout, known, renderer) and (turn := turn_candidate(layout)) is not None:
            wanted.append(turn)
        for candidate in marked:
            if self._is_new(candidate, wanted):
                wanted.append(candidate)
        for index, text in shared:
            if self._positions.get(key := cut_key(layout, index, text.key)) is None:
                if layout.chat.ids is not None:  # a character for each token: there is nothing to render
                    self._positions.put(key, Position(len(text.text), key))
                    continue
                cut = cut_candidate(layout, index, len(text.text), "learned")
                if cut is not None and self._is_new(cut, wanted):
                    wanted.append(cut)
        return wanted

    def _is_new(self, candidate: Candidate, wanted: Sequence[Candidate]) -> bool:
        return self._positions.get(candidate.key) is None and all(candidate.key != other.key for other in wanted)

    def _deserves_turn(self, layout: PromptLayout, known: bool, renderer: Renderer) -> bool:
        if layout.turn_key is None or self._positions.get(layout.turn_key) is not None:
            return False
        long = layout.last_size >= LONG_TEXT_CHARACTERS
        return not known or long or (isinstance(renderer, VerifiedRenderer) and renderer.is_cheap(layout.chat.body))

    def _found(
        self,
        layout: PromptLayout,
        marked: Sequence[Candidate],
        shared: Sequence[tuple[int, SharedText]],
        result: Result,
        measure: Measurement | None = None,
        odd: Sequence[tuple[Candidate, Position]] = (),
    ) -> Found:
        """Everything remembered of this chat, except that `odd` candidates lie elsewhere in this one request."""
        here = {candidate.key: position for candidate, position in odd}
        boundaries: list[Boundary] = []

        def add(kind: Kind, key: bytes | None) -> Position | None:
            position = (here.get(key) or self._positions.get(key)) if key is not None else None
            if position is not None and position.tokens:
                boundaries.append(Boundary(position.tokens, kind, position.key))
            return position

        add("system", layout.system_key)
        add("history", layout.key)
        add("turn", user_key(layout))
        turn = add("turn", layout.turn_key)
        for candidate in marked:
            add("explicit", candidate.key)
        for index, text in shared:
            add("learned", cut_key(layout, index, text.key))
        boundaries.sort(key=lambda boundary: boundary.tokens)
        known = self._positions.known(layout.prefixes)
        # Nothing before the last text lies behind it, but an earlier turn may seem to if it was rendered differently:
        # templates drop the thinking of a loop once it is over.
        history = self._positions.get(layout.key)
        deepest = max((boundary.tokens for boundary in boundaries), default=0)
        if history is not None:
            known = {at: key for at, key in known.items() if at <= max(history.tokens, deepest)}
        if measure is not None:
            measure.drop_others(known)
        known |= {boundary.tokens: boundary.key for boundary in boundaries}
        return Found(
            tuple(boundaries),
            tuple(known[tokens] for tokens in sorted(known)),
            result if boundaries else "none",
            None if boundaries else "no_boundary",
            layout.key,
            layout,
            measure.prompt if measure is not None else None,
            measure.renders if measure is not None else 0,
            turn.key if turn is not None else None,
        )
