"""Template facts of every worker's models, learnt beside the requests and remembered for one boot.

`facts` answers at once. `learn` asks the worker for some 140 small renders, one learning at a time; a worker that fails
is asked again later, at longer and longer intervals. Nothing here raises for what a worker, template or client does.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from proxy.boundaries.renderer import Renderer, RenderFailed
from proxy.boundaries.template_facts import DEFAULT, Setting, TemplateFacts, setting_of
from proxy.boundaries.template_probe import SAMPLES, Render, learn_facts

logger = logging.getLogger("seamark.boundaries")
MAX_SETTINGS = 256  # of one template, beside the default one

# Learnings a minute that clients can cause: by settings not seen before, and by chat templates of their own.
SETTINGS_PER_MINUTE, TEMPLATES_PER_MINUTE = 30, 4
SETTINGS_PER_KEY, TEMPLATES_PER_KEY = 15, 2  # as many of these as one API key may cause
MINUTE = 60.0
LEARNING_SECONDS = 90.0  # that one learning may take, however long each of its renders does
REST = 4.0  # seconds without another learning of clients' for each second of one
RETRY_SECONDS, MAX_RETRY_SECONDS = 5.0, 600.0  # after the first failure, doubled by each further one

# Bytes of a setting that is learnt: it goes along with each of the renders. Real templates have some 20,000.
MAX_SETTING_BYTES = 262_144

# Tokens of one of our small chats. A client's template may write any number of them, and they are searched.
MAX_RENDERED = 32_768

# Learnings under way or waiting for their turn; clients cause no more, so a worker whose renders hang gathers none.
MAX_RUNNING = 32

# Learnt in advance: the flags by which many templates switch thinking.
COMMON_SETTINGS = tuple(
    setting_of({"chat_template_kwargs": {name: value}})
    for name in ("enable_thinking", "thinking")
    for value in (True, False)
)


class _Failures(NamedTuple):
    times: int
    retry_at: float  # of the clock


class _Template:
    def __init__(self) -> None:
        self.facts: OrderedDict[bytes, TemplateFacts] = OrderedDict()
        self.failed: OrderedDict[bytes, _Failures] = OrderedDict()
        self.running: dict[bytes, asyncio.Future[None]] = {}
        self.rests_until = 0.0


class FactsLearner:
    """The facts of all templates, by renderer id and setting."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock` in seconds."""
        self._clock = clock
        self._templates: dict[bytes, _Template] = {}
        self._locks: WeakKeyDictionary[Renderer, asyncio.Lock] = WeakKeyDictionary()
        # When clients caused a learning, and whose key it was; by whether it is of a template of theirs.
        self._started: dict[bool, deque[tuple[float, str | None]]] = {False: deque(), True: deque()}

    def facts(self, renderer_id: bytes, setting: Setting = DEFAULT) -> TemplateFacts | None:
        """What is known by now; None: nothing.

        For a setting that is not learnt yet: the openers of the default one, which settings do not move, and the
        longest end known of the template, seldom behind the true one (`TemplateFacts.is_own` is false then).
        """
        if (template := self._templates.get(renderer_id)) is None:
            return None
        if (known := template.facts.get(setting.key)) is not None:
            template.facts.move_to_end(setting.key)
            return known
        default = template.facts.get(DEFAULT.key)
        if default is None or setting.template:
            return None
        learnt = template.facts.values()
        ends = {role: max(each.ends.get(role, 0) for each in learnt) for role in default.ends}
        return replace(default, ends=ends, is_own=False)

    def wants(self, renderer_id: bytes, setting: Setting = DEFAULT, owner: str | None = None) -> bool:
        """Whether `learn` would ask the worker anything now, for a request that came with the API key `owner`."""
        if not self._is_open(renderer_id, setting):
            return False
        template = self._templates.get(renderer_id)
        is_resting = template is not None and self._clock() < template.rests_until
        return setting.is_default or (not is_resting and self._has_room(setting, owner))

    async def learn(
        self, renderer: Renderer, renderer_id: bytes, model: Any, setting: Setting = DEFAULT, owner: str | None = None
    ) -> None:
        """Learn a setting through this worker, if that is wanted; waits for one who is learning it."""
        if self.wants(renderer_id, setting, owner):
            if not setting.is_default:
                self._started[setting.template].append((self._clock(), owner))
            await self._learn(renderer, renderer_id, model, setting, rests=not setting.is_default)
        elif (template := self._templates.get(renderer_id)) and (running := template.running.get(setting.key)):
            await asyncio.wait((running,))

    async def learn_common(self, renderer: Renderer, renderer_id: bytes, model: Any) -> None:
        """Learn the default setting, and those that switch thinking: what most requests have."""
        await self.learn(renderer, renderer_id, model)
        for setting in COMMON_SETTINGS if self.facts(renderer_id) is not None else ():
            if self._is_open(renderer_id, setting):
                await self._learn(renderer, renderer_id, model, setting)

    def forget(self, renderer_id: bytes) -> None:
        """A worker with this renderer has started anew: nothing learnt before holds."""
        self._templates.pop(renderer_id, None)

    async def _learn(
        self, renderer: Renderer, renderer_id: bytes, model: Any, setting: Setting, rests: bool = False
    ) -> None:
        """Learn one setting; no client causes another learning for a while after one that `rests`."""
        template = self._templates.setdefault(renderer_id, _Template())
        done = template.running[setting.key] = asyncio.get_running_loop().create_future()
        facts = None
        try:
            async with self._locks.setdefault(renderer, asyncio.Lock()):
                began = self._clock()
                try:
                    async with asyncio.timeout(LEARNING_SECONDS):
                        facts = await _learnt(renderer, model, setting, template.facts.get(DEFAULT.key))
                finally:
                    if rests:
                        now = self._clock()
                        template.rests_until = now + REST * (now - began)
        except (RenderFailed, TimeoutError):
            logger.info("The worker did not answer while a chat template was learnt; that is tried again later.")
        except Exception as error:
            # The kind alone: the message of an unexpected error might hold text of a client's template.
            logger.warning("A chat template was not learnt: %s.", type(error).__name__)
        finally:
            del template.running[setting.key]
            self._store(template, setting, facts)
            done.set_result(None)

    def _store(self, template: _Template, setting: Setting, facts: TemplateFacts | None) -> None:
        if facts is None:
            times = template.failed[setting.key].times + 1 if setting.key in template.failed else 1
            wait = min(RETRY_SECONDS * 2 ** (times - 1), MAX_RETRY_SECONDS)
            template.failed[setting.key] = _Failures(times, self._clock() + wait)
            template.failed.move_to_end(setting.key)
            if len(template.failed) > MAX_SETTINGS:
                template.failed.popitem(last=False)
            return
        template.failed.pop(setting.key, None)
        template.facts[setting.key] = facts
        if len(template.facts) > MAX_SETTINGS + 1:
            del template.facts[next(key for key in template.facts if key != DEFAULT.key)]

    def _is_open(self, renderer_id: bytes, setting: Setting) -> bool:
        """Whether it is unknown, is not being learnt, and has not just failed."""
        if (template := self._templates.get(renderer_id)) is None:
            return True
        if setting.key in template.facts or setting.key in template.running:
            return False
        failures = template.failed.get(setting.key)
        return failures is None or self._clock() >= failures.retry_at

    def _has_room(self, setting: Setting, owner: str | None) -> bool:
        """Whether the setting is small, and clients have caused few enough learnings in the last minute."""
        running = sum(len(template.running) for template in self._templates.values())
        if setting.size > MAX_SETTING_BYTES or running >= MAX_RUNNING:
            return False
        started = self._started[setting.template]
        while started and started[0][0] <= self._clock() - MINUTE:
            started.popleft()
        if owner is not None:
            of_owner = sum(each == owner for _, each in started)
            if of_owner >= (TEMPLATES_PER_KEY if setting.template else SETTINGS_PER_KEY):
                return False
        return len(started) < (TEMPLATES_PER_MINUTE if setting.template else SETTINGS_PER_MINUTE)


async def _learnt(
    renderer: Renderer, model: Any, setting: Setting, default: TemplateFacts | None
) -> TemplateFacts | None:
    """The facts of a setting, given those of the default one. Raises `RenderFailed` if the worker does not answer."""

    def rendering(fields: Mapping[str, Any]) -> Render:
        async def render(body: Mapping[str, Any]) -> Sequence[int]:
            try:
                ids = await renderer({"model": model, **fields, **body})
            except RenderFailed as error:
                if not error.answer:
                    raise
                return ()  # the worker's own refusal of such a chat
            return ids if len(ids) <= MAX_RENDERED else ()

        return render

    async def detokenize(ids: Sequence[int]) -> str | None:
        asked = getattr(renderer, "detokenize", None)
        return await asked(model, ids) if asked is not None else None

    render = rendering(setting.fields)
    if default is not None and not setting.is_default and not setting.template:
        plain = rendering(DEFAULT.fields)
        if all([await render(body) == await plain(body) for body in SAMPLES]):
            return default
    return await learn_facts(render, detokenize)
