"""Template facts of every worker's models, learnt beside the requests and remembered for one boot.

`facts` answers at once. `learn` asks the worker for some 80 small renders, one learning at a time; a worker that fails
is asked again later, at longer and longer intervals. Nothing here raises for what a worker, template or client does.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, Protocol, runtime_checkable
from weakref import WeakKeyDictionary

from proxy.boundaries.renderer import Renderer, RenderFailed
from proxy.boundaries.template_facts import DEFAULT, Role, Setting, TemplateFacts, setting_of
from proxy.boundaries.template_probe import ends_with, learn_facts, sample

logger = logging.getLogger("seamark.boundaries")

MAX_SETTINGS = 256  # beside the default ones

# Learnings a minute that clients can cause: by settings not seen before, and by chat templates of their own.
SETTINGS_PER_MINUTE, TEMPLATES_PER_MINUTE = 30, 4

# As many of these as one API key may cause.
SETTINGS_PER_KEY, TEMPLATES_PER_KEY = 15, 2

# Seconds that one learning may take, however long each of its renders does.
LEARNING_SECONDS = 60.0

# Seconds without another learning of clients' for each second of one.
REST = 4.0

# Bytes of a setting that is learnt: it goes along with each of the renders. Real templates have some 20,000.
MAX_SETTING_BYTES = 262_144

# Tokens of one of our small chats. A client's template may write any number of them, and they are searched.
MAX_RENDERED = 32_768

# Learnings under way or waiting for their turn; clients cause no more, so a worker whose renders hang gathers none.
MAX_RUNNING = 32

MINUTE = 60.0

RETRY_SECONDS, MAX_RETRY_SECONDS = 5.0, 600.0  # after the first failure, doubled by each further one

# Learnt in advance: the flags by which many templates switch thinking.
COMMON_SETTINGS = tuple(
    setting_of({"chat_template_kwargs": {name: value}})
    for name in ("enable_thinking", "thinking")
    for value in (True, False)
)


@runtime_checkable
class Detokenizer(Protocol):
    """A renderer that also turns token ids into text."""

    async def detokenize(self, model: Any, ids: Sequence[int]) -> str | None:
        """The text of these ids; None if there is none to be had."""


class _Name(NamedTuple):
    renderer_id: bytes
    setting: bytes


class _Failures(NamedTuple):
    times: int
    retry_at: float  # of the clock


class FactsLearner:
    """The facts of all templates, by renderer id and setting. One per gateway."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock` in seconds."""
        self._clock = clock
        self._defaults: dict[bytes, TemplateFacts] = {}  # by renderer id
        self._others: OrderedDict[_Name, TemplateFacts] = OrderedDict()
        self._failed: OrderedDict[_Name, _Failures] = OrderedDict()
        self._running: dict[_Name, asyncio.Future[None]] = {}
        self._locks: WeakKeyDictionary[Renderer, asyncio.Lock] = WeakKeyDictionary()
        # When clients caused a learning, and whose key it was; by whether it is of a template of theirs.
        self._started: dict[bool, deque[tuple[float, str | None]]] = {False: deque(), True: deque()}
        self._rests_until: dict[bytes, float] = {}  # by renderer id
        self.learnt = 0  # settings
        self.failures = 0  # learnings that gave nothing
        self.renders = 0  # asked for

    def __len__(self) -> int:
        return len(self._defaults) + len(self._others)

    def facts(self, renderer_id: bytes, setting: Setting = DEFAULT) -> TemplateFacts | None:
        """What is known by now; None: nothing.

        For a setting that is not learnt yet: the openers of the default one, which settings do not move, and the
        longest end known of the template, seldom behind the true one (`TemplateFacts.is_own` is false then).
        """
        name = _Name(renderer_id, setting.key)
        if setting.is_default:
            return self._defaults.get(renderer_id)
        if (known := self._others.get(name)) is not None:
            self._others.move_to_end(name)
            return known
        default = self._defaults.get(renderer_id)
        if default is None or setting.template:
            return None
        return default.borrowed(self._longest_ends(renderer_id))

    def wants(self, renderer_id: bytes, setting: Setting = DEFAULT, owner: str | None = None) -> bool:
        """Whether `learn` would ask the worker anything now, for a request that came with the API key `owner`."""
        if not self._is_open(renderer_id, setting):
            return False
        if setting.is_default:
            return True
        return self._clock() >= self._rests_until.get(renderer_id, 0.0) and self._has_room(setting, owner)

    async def learn(
        self,
        renderer: Renderer,
        renderer_id: bytes,
        model: Any,
        setting: Setting = DEFAULT,
        owner: str | None = None,
    ) -> None:
        """Learn a setting through this worker, if that is wanted; waits for one who is learning it."""
        if self.wants(renderer_id, setting, owner):
            if not setting.is_default:
                self._started[setting.template].append((self._clock(), owner))
            await self._learn(renderer, renderer_id, model, setting, rests=not setting.is_default)
        elif (running := self._running.get(_Name(renderer_id, setting.key))) is not None:
            await asyncio.wait((running,))

    async def learn_common(self, renderer: Renderer, renderer_id: bytes, model: Any) -> None:
        """Learn the default setting, and those that switch thinking: what most requests have."""
        await self.learn(renderer, renderer_id, model)
        for setting in COMMON_SETTINGS if renderer_id in self._defaults else ():
            if self._is_open(renderer_id, setting):
                await self._learn(renderer, renderer_id, model, setting)

    def forget(self, renderer_id: bytes) -> None:
        """A worker with this renderer has started anew: nothing learnt before holds."""
        self._defaults.pop(renderer_id, None)
        self._rests_until.pop(renderer_id, None)
        for names in (self._others, self._failed, self._running):
            for name in [name for name in names if name.renderer_id == renderer_id]:
                del names[name]

    async def _learn(
        self, renderer: Renderer, renderer_id: bytes, model: Any, setting: Setting, rests: bool = False
    ) -> None:
        """Learn one setting; no client causes another learning for a while after one that `rests`."""
        name = _Name(renderer_id, setting.key)
        done = self._running[name] = asyncio.get_running_loop().create_future()
        facts = None
        try:
            async with self._locks.setdefault(renderer, asyncio.Lock()):
                began = self._clock()
                try:
                    async with asyncio.timeout(LEARNING_SECONDS):
                        facts = await self._learnt(renderer, renderer_id, model, setting)
                finally:
                    if rests:
                        now = self._clock()
                        self._rests_until[renderer_id] = now + REST * (now - began)
        except (RenderFailed, TimeoutError):
            logger.info("The worker did not answer while a chat template was learnt; that is tried again later.")
        except Exception as error:
            # The kind alone: the message of an unexpected error might hold text of a client's template.
            logger.warning("A chat template was not learnt: %s.", type(error).__name__)
        finally:
            if self._running.get(name) is done:  # else the worker has restarted meanwhile
                del self._running[name]
                self._store(name, setting, facts)
            done.set_result(None)

    async def _learnt(
        self, renderer: Renderer, renderer_id: bytes, model: Any, setting: Setting
    ) -> TemplateFacts | None:
        """The facts of a setting. Raises `RenderFailed` if the worker does not answer."""

        async def render(body: Mapping[str, Any]) -> Sequence[int] | None:
            self.renders += 1
            try:
                rendered = await renderer({"model": model, **body})
            except RenderFailed as error:
                if not error.answer:
                    raise
                return None  # the worker's own refusal of such a chat
            if len(rendered) > MAX_RENDERED:
                return None
            return rendered

        async def text_of(ids: Sequence[int]) -> str | None:
            return await renderer.detokenize(model, ids) if isinstance(renderer, Detokenizer) else None

        default = self._defaults.get(renderer_id)
        if default is not None and not setting.is_default and not setting.template:
            if await sample(render, setting.fields) == await sample(render, {}):
                return default
            few = await ends_with(render, default, setting.fields)
            if few is not None and few.openers_hold:
                return replace(default, ends=few.ends)
        return await learn_facts(render, text_of, setting.fields)

    def _store(self, name: _Name, setting: Setting, facts: TemplateFacts | None) -> None:
        if facts is None:
            self.failures += 1
            times = self._failed[name].times + 1 if name in self._failed else 1
            wait = min(RETRY_SECONDS * 2 ** (times - 1), MAX_RETRY_SECONDS)
            self._failed[name] = _Failures(times, self._clock() + wait)
            self._failed.move_to_end(name)
            if len(self._failed) > MAX_SETTINGS:
                self._failed.popitem(last=False)
            return
        self.learnt += 1
        self._failed.pop(name, None)
        if setting.is_default:
            self._defaults[name.renderer_id] = facts
            return
        self._others[name] = facts
        if len(self._others) > MAX_SETTINGS:
            self._others.popitem(last=False)

    def _is_open(self, renderer_id: bytes, setting: Setting) -> bool:
        """Whether it is unknown, is not being learnt, and has not just failed."""
        name = _Name(renderer_id, setting.key)
        known = renderer_id in self._defaults if setting.is_default else name in self._others
        if known or name in self._running:
            return False
        failures = self._failed.get(name)
        return failures is None or self._clock() >= failures.retry_at

    def _has_room(self, setting: Setting, owner: str | None) -> bool:
        """Whether the setting is small, and clients have caused few enough learnings in the last minute."""
        if setting.size > MAX_SETTING_BYTES or len(self._running) >= MAX_RUNNING:
            return False
        started = self._started[setting.template]
        while started and started[0][0] <= self._clock() - MINUTE:
            started.popleft()
        if owner is not None:
            of_owner = sum(each == owner for _, each in started)
            if of_owner >= (TEMPLATES_PER_KEY if setting.template else SETTINGS_PER_KEY):
                return False
        return len(started) < (TEMPLATES_PER_MINUTE if setting.template else SETTINGS_PER_MINUTE)

    def _longest_ends(self, renderer_id: bytes) -> dict[Role, int]:
        """By role, of all settings known of this template."""
        known = [facts for name, facts in self._others.items() if name.renderer_id == renderer_id]
        ends = dict(self._defaults[renderer_id].ends)
        for facts in known:
            for role in ends.keys() & facts.ends.keys():
                ends[role] = max(ends[role], facts.ends[role])
        return ends
