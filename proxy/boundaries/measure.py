"""Measuring places: render the prompt, render each variant, compare tokens.

Everything is compared with the real prompt, never one variant with another, so that a template which lets content
decide how earlier turns render can only make a prefix shorter.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from xxhash import xxh3_128_digest

from proxy.boundaries.candidates import Candidate, PromptLayout, with_text_at
from proxy.boundaries.positions import Position
from proxy.boundaries.renderer import Renderer, RenderFailed
from proxy.boundaries.sentinel import MERGING, is_telling, other_sentinel, sentinel_for
from proxy.boundaries.token_ids import TokenIds
from proxy.chat.chat import CHAT

MAX_TEMPLATE_FACTS = 4096

# Tokens before a place that decide whether the next text could grow together with them.
TAIL_TOKENS = 3


class TemplateFacts:
    """What was learnt of templates and tokenizers once and for all; bounded."""

    def __init__(self) -> None:
        self._known: OrderedDict[tuple[Any, ...], bool] = OrderedDict()

    def __len__(self) -> int:
        return len(self._known)

    def get(self, name: tuple[Any, ...]) -> bool | None:
        return self._known.get(name)

    def put(self, name: tuple[Any, ...], value: bool) -> None:
        self._known[name] = value
        if len(self._known) > MAX_TEMPLATE_FACTS:
            self._known.popitem(last=False)


class MeasuredBoundary(NamedTuple):
    """Where a candidate lies."""

    candidate: Candidate
    here: Position  # in this very prompt
    always: Position  # in prompts with an ordinary text behind the place


class Measurement:
    """The renders for one request; `renders` counts those that a worker was asked for."""

    def __init__(self, layout: PromptLayout, renderer: Renderer, renderer_id: bytes, facts: TemplateFacts) -> None:
        self._layout = layout
        self._renderer = renderer
        self._renderer_id = renderer_id
        self._facts = facts
        self.prompt: TokenIds | None = None
        self._contexts: dict[int, bytes] = {}
        self.renders = 0

    @property
    def local(self) -> bool:
        """Whether the gateway rendered the prompt by itself."""
        return self.prompt is not None and self.prompt.local

    async def positions(self, places: Sequence[Candidate]) -> list[MeasuredBoundary]:
        """Those places that lie behind the prompt's first token. Raises `RenderFailed` for the prompt itself."""
        chat = self._layout.chat
        rendered = await asyncio.gather(
            self._render(chat.asked, chat.path),
            *(self._render(*chat.spelled(place.variant)) for place in places),
            *(self._render(variant) for variant in self._second_opinions(places)),
        )
        prompt, variants, second = rendered[0], rendered[1 : 1 + len(places)], rendered[1 + len(places) :]
        if isinstance(prompt, RenderFailed) and chat.native is not None:
            prompt = await self._render(chat.body)  # a worker may render chats only
        if isinstance(prompt, RenderFailed):
            raise prompt
        self.prompt = prompt
        found = []
        opinions = iter(second)
        for place, variant in zip(places, variants, strict=True):
            opinion = next(opinions) if self._is_doubtful(place) else None
            # A template that refuses the variant (role order, say) costs that boundary only.
            if isinstance(variant, RenderFailed):
                continue
            await asyncio.sleep(0)  # each takes some milliseconds for the longest prompts: not all in one go
            here = prompt.common_prefix(variant)
            always, judge = here, prompt
            if isinstance(opinion, TokenIds) and (neutral := variant.common_prefix(opinion)) > here + 1:
                always, judge = neutral, variant
            if place.text is not None:
                here, always = await self._backed_off(place, here, prompt), await self._backed_off(place, always, judge)
            elif not await self._turn_holds(place, here, prompt):
                continue
            elif here == len(prompt):
                here = always = here - 1  # nothing asks for an answer here: the next words could merge with the last
            if here > 0 or always > 0:
                context = self._context(len(place.variant["messages"]))
                own = Position(here, prompt.key(here, *context))
                usual = own if judge is prompt else Position(always, judge.key(always, *context))
                found.append(MeasuredBoundary(place, own, usual))
        return found

    def drop_others(self, known: dict[int, bytes]) -> None:
        """Take the names of prefixes (by length in tokens) out of `known` that this prompt does not start with.

        From the deepest on, until one is right: what lies before it is right as well.
        """
        if self.prompt is None or self._layout.chat.ids is not None:
            return
        names = self._context(len(self._layout.chat.messages))
        if names != self._context(0):
            return  # a name depends on which media stand before it, too
        for tokens in sorted(known, reverse=True):
            if tokens <= len(self.prompt) and self.prompt.key(tokens, *names) == known[tokens]:
                return
            del known[tokens]

    def _context(self, messages: int) -> tuple[bytes, bytes]:
        """What parts the caches beside the tokens: model, salt, and whatever is not text in the first `messages`."""
        if messages not in self._contexts:  # images are megabytes, and places of one prompt are several
            body = self._layout.chat.body
            media = [part for index, part in self._layout.chat.media if index < messages]
            apart = repr((body.get("model"), body.get("cache_salt"), media))
            self._contexts[messages] = xxh3_128_digest(apart.encode(errors="surrogatepass"))
        return self._renderer_id, self._contexts[messages]

    def _is_doubtful(self, place: Candidate) -> bool:
        return place.kind == "history" and is_telling(self._text(place) or "")

    def _second_opinions(self, places: Sequence[Candidate]) -> list[Mapping[str, Any]]:
        """Where the template may read the real text: a second sentinel, for where neutral texts part."""
        variants: list[Mapping[str, Any]] = []
        for place in places:
            if place.text is not None and self._is_doubtful(place):
                sentinel = other_sentinel(sentinel_for(self._text(place) or ""))
                variants.append(with_text_at(self._layout, place.text, sentinel))
        return variants

    def _text(self, place: Candidate) -> str | None:
        return self._layout.chat.texts[place.text] if place.text is not None else None

    async def _backed_off(self, place: Candidate, tokens: int, prompt: TokenIds) -> int:
        """One token less where some other text would grow together with the last one."""
        # Before a learned place there is text, which has its own say.
        if place.text is None or tokens <= 1 or place.kind == "learned":
            return tokens
        name = ("merges", self._renderer_id, prompt.tail(tokens, TAIL_TOKENS))
        if (merges := self._facts.get(name)) is None:
            probes = [with_text_at(self._layout, place.text, text) for text in MERGING]
            rendered = await asyncio.gather(*(self._render(probe) for probe in probes))
            others = [other for other in rendered if isinstance(other, TokenIds)]
            merges = any(prompt.common_prefix(other) < tokens for other in others)
            if others:  # what cannot be told this time is asked again
                self._facts.put(name, merges)
        return tokens - 1 if merges else tokens

    async def _turn_holds(self, place: Candidate, tokens: int, prompt: TokenIds) -> bool:
        """Whether templates leave a finished turn as it is once the next one follows.

        Some put the system prompt or the tools into the last user message: then nothing before an answer stays.
        """
        messages, roles = self._layout.chat.messages, self._layout.chat.roles
        if place.kind != "turn" or roles[-1] != "user" or place.key != self._layout.turn_key:
            return True
        body = self._layout.chat.body
        name = ("turn", self._renderer_id, len(messages) > 2, roles[0] == "system", bool(body.get("tools")))
        if (holds := self._facts.get(name)) is None:
            more = [*messages, {"role": "assistant", "content": "Quartz"}, {"role": "user", "content": "Quartz"}]
            following = await self._render({**body, "messages": more})
            # What cannot be told this time is asked again.
            if not isinstance(following, TokenIds):
                return True
            holds = prompt.common_prefix(following) >= tokens - 1
            self._facts.put(name, holds)
        return holds

    async def _render(self, body: Mapping[str, Any], path: str = CHAT) -> TokenIds | RenderFailed:
        try:
            rendered = await self._renderer(body, path)
        except RenderFailed as error:
            self.renders += 1
            return error
        tokens = rendered if isinstance(rendered, TokenIds) else TokenIds.of(rendered)
        self.renders += not tokens.local
        return tokens
