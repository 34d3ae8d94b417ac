"""Boundaries of a chat: the token positions worth a checkpoint, remembered under canonical keys.

A boundary is found by rendering once, and from then on known for every request that starts alike.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from proxy.boundaries.boundary import Boundary, Found, Result
from proxy.boundaries.candidates import (
    Candidate,
    Kind,
    PromptLayout,
    cut_key,
    cut_place,
    history_place,
    layout_of,
    marked_place,
    system_place,
    turn_place,
    user_key,
    user_place,
)
from proxy.boundaries.learned import DivergenceLearner, SharedText
from proxy.boundaries.local_renderer import VerifiedRenderer
from proxy.boundaries.measure import Measurement, TemplateFacts
from proxy.boundaries.positions import Position, PositionCache
from proxy.boundaries.renderer import Renderer, RenderFailed
from proxy.boundaries.sentinel import text_of
from proxy.chat.chat import Chat

# A new last text of this size is worth a render of its own on an otherwise known prompt, so that the next turn finds
# its end: some thousand tokens, more than the pass that a checkpoint can cost. vLLM's own stop near the prompt's end
# serves shorter ones.
LONG_TEXT_CHARACTERS = 4096

# Marks of one request that are looked at; the APIs that have them allow four.
MAX_MARKS = 8


class BoundaryFinder:
    """Finds boundaries through a renderer, and remembers them. One per gateway."""

    def __init__(
        self, memory: PositionCache, learner: DivergenceLearner | None = None, traits: TemplateFacts | None = None
    ) -> None:
        """Without a `learner` only places between messages, and those a client marks, are found."""
        self._memory = memory
        self._learner = learner
        self._traits = traits if traits is not None else TemplateFacts()
        self._pending: dict[bytes, asyncio.Future[None]] = {}

    async def find(self, chat: Chat | None, renderer: Renderer, renderer_id: bytes) -> Found:
        """Boundaries of a chat. Never raises for what a client or a template does: `failure` says why not.

        `renderer_id` stands for tokenizer and template; positions of one do not serve another.
        """
        layout = layout_of(chat, renderer_id) if chat is not None else None
        if layout is None:
            return Found(failure="no_boundary")
        cuts = self._cuts(layout)
        marked = [place for mark in chat.marks[:MAX_MARKS] if (place := marked_place(layout, mark)) is not None]
        if not (wanted := self._unknown(layout, marked, cuts, renderer)):
            return self._found(layout, marked, cuts, "memo")
        pending = self._pending.get(layout.key)
        if pending is not None and self._memory.get(layout.key) is None:
            # Someone is rendering this very prefix: a cold fan-out costs one set of renders.
            await asyncio.wait((pending,))
            if not (wanted := self._unknown(layout, marked, cuts, renderer)):
                return self._found(layout, marked, cuts, "memo")
        done = asyncio.get_running_loop().create_future()
        self._pending[layout.key] = done
        measure = Measurement(layout, renderer, renderer_id, self._traits)
        odd: list[tuple[Candidate, Position]] = []
        try:
            for place, here, always in await measure.positions(wanted):
                self._memory.put(place.key, always)
                if here != always:
                    odd.append((place, here))
        except RenderFailed:
            found = self._found(layout, marked, cuts, "memo", measure)
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
        return self._found(layout, marked, cuts, result, measure, odd)

    def _cuts(self, layout: PromptLayout) -> list[tuple[int, SharedText]]:
        """Places inside texts where recent traffic diverged: message index, and the text before the place."""
        if self._learner is None:
            return []
        # What lies before the last text of a known chat is behind a deeper boundary.
        return self._learner.cuts(layout, layout.last if self._memory.get(layout.key) is not None else 0)

    def _unknown(
        self,
        layout: PromptLayout,
        marked: Sequence[Candidate],
        cuts: Sequence[tuple[int, SharedText]],
        renderer: Renderer,
    ) -> list[Candidate]:
        """Places whose position has to be measured before this request goes on; none on a known path."""
        known = layout.chat.is_bare or self._memory.get(layout.key) is not None
        wanted: list[Candidate] = []
        if not known:
            places = (history_place(layout), system_place(layout), user_place(layout))
            wanted += [place for place in places if place is not None and self._memory.get(place.key) is None]
        if self._deserves_turn(layout, known, renderer):
            wanted.append(turn_place(layout))
        for place in marked:
            if self._is_new(place, wanted):
                wanted.append(place)
        for index, cut in cuts:
            if self._memory.get(key := cut_key(layout, index, cut.key)) is None:
                if layout.chat.ids is not None:  # a character for each token: there is nothing to render
                    self._memory.put(key, Position(len(cut.text), key))
                    continue
                place = cut_place(layout, index, len(cut.text), "learned")
                if place is not None and self._is_new(place, wanted):
                    wanted.append(place)
        return wanted

    def _is_new(self, place: Candidate, wanted: Sequence[Candidate]) -> bool:
        return self._memory.get(place.key) is None and all(place.key != other.key for other in wanted)

    def _deserves_turn(self, layout: PromptLayout, known: bool, renderer: Renderer) -> bool:
        if layout.turn_key is None or self._memory.get(layout.turn_key) is not None:
            return False
        long = len(text_of(layout.chat.messages[layout.last]) or "") >= LONG_TEXT_CHARACTERS
        return not known or long or (isinstance(renderer, VerifiedRenderer) and renderer.is_cheap(layout.chat.body))

    def _found(
        self,
        layout: PromptLayout,
        marked: Sequence[Candidate],
        cuts: Sequence[tuple[int, SharedText]],
        result: Result,
        measure: Measurement | None = None,
        odd: Sequence[tuple[Candidate, Position]] = (),
    ) -> Found:
        """Everything remembered of this chat, except that `odd` places lie elsewhere in this one request."""
        here = {place.key: position for place, position in odd}
        boundaries: list[Boundary] = []

        def add(kind: Kind, key: bytes | None) -> Position | None:
            position = (here.get(key) or self._memory.get(key)) if key is not None else None
            if position is not None and position.tokens:
                boundaries.append(Boundary(position.tokens, kind, position.key))
            return position

        add("system", layout.system_key)
        add("history", layout.key)
        add("turn", user_key(layout))
        turn = add("turn", layout.turn_key)
        for place in marked:
            add("explicit", place.key)
        for index, cut in cuts:
            add("learned", cut_key(layout, index, cut.key))
        boundaries.sort(key=lambda boundary: boundary.tokens)
        known = self._memory.known(layout.prefixes)
        # Nothing before the last text lies behind it, but a turn that was rendered otherwise then may seem to:
        # templates drop the thinking of a loop once it is over.
        history = self._memory.get(layout.key)
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
