"""Prompts that are to stay in every worker's cache: made ready when a worker starts, and again whenever it restarts.

A prompt is sent once to each worker that serves its model, with its hint and the wish to pin it; the engine holds its
blocks (`engine_patches/scheduler/pins.py`) within a share of the cache, and says what became of the wish. What an
operator pins is kept in memory as it was given; a prompt without a file is gone with the gateway's process.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, field_validator

from proxy.chat.chat import CHAT
from proxy.config_files import WatchedFile, complaint_of
from proxy.errors import BadRequest, NotFound, PinRefused, SettingsError
from proxy.fleet.hot_prefixes import WarmupRequest, replay_all
from proxy.fleet.part import Change, Part
from proxy.fleet.pool import WorkerPool
from proxy.fleet.worker import Worker
from proxy.http.auth import ApiKey, KeyRing
from proxy.http.client import Broken, Unreachable
from proxy.http.json_body import memory_of, parse_object
from proxy.pipeline.exchange import exchange_of
from proxy.pipeline.prompt_reader import PromptReader
from proxy.pipeline.replayer import Replayer
from proxy.settings import Settings

logger = logging.getLogger("seamark.pinned_prompts")
MOST_PROMPTS, MOST_BYTES = 64, 2**24  # of all prompts together
MAX_NAME = 128  # characters
POLL_SECONDS = 1.0
RETRY_SECONDS = 30.0  # after that a worker that failed is asked again
STOP_SECONDS = 5.0  # for releasing, when the gateway stops, what nobody could release after it
PINNED, RELEASED = "pinned", "released"
NO_ROOM = "no_room"  # in the engine's share of pins
WAITING, FAILED, NO_FACTS, UNTOLD = "waiting", "failed", "no_facts", "not_told"
NOT_RELEASED = "not_released"

WORDS = {
    PINNED: "in the cache, and stays there",
    RELEASED: "in the cache like any other prompt",
    NO_ROOM: "pins hold their whole share of the cache: SEAMARK_PIN_SHARE of the worker, or unpin another",
    "not_cached": "too short for a state, or the cache had no block to spare",
    WAITING: "not tried yet: the worker is down, starts, or gets no hints",
    FAILED: "the worker answered with an error; it is tried again",
    NO_FACTS: "its chat template does not tell where a prompt can be cut; it is tried again",
    UNTOLD: "the worker does not say: its reports cannot be read",
    NOT_RELEASED: "still in the cache: the worker could not be told; it is told again",
}

# What is tried again by itself, and what a release of another pin may change.
_PASSING = frozenset({FAILED, NO_FACTS})


class PinEntry(BaseModel):
    """One prompt, in the file or in the body of `POST /seamark/prefixes`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str = Field(min_length=1, max_length=MAX_NAME, pattern=r"^[^\x00-\x1f/?#\x7f]+$")
    body: dict[str, Any]  # a chat request
    key: str | None = None  # name of the API key whose prefix cache it is for

    @field_validator("name")
    @classmethod
    def _name(cls, name: str) -> str:
        if not name.isprintable():
            raise ValueError("it has characters that cannot be shown")
        return name


EXAMPLE = """\
A correct file: [{"name": "rules", "body": {"model": "M", "messages": [{"role": "system", "content": "..."}]}}]"""

_FILE = TypeAdapter(list[PinEntry])


class Fate(NamedTuple):
    boot: str
    word: str  # of `WORDS`
    again_at: float  # time.monotonic(): the worker is not asked again before


@dataclass(eq=False)
class PinnedPrompt:
    name: str
    model: str
    raw: bytes  # the chat request
    key: ApiKey | None
    from_file: bool
    salt: str | None = field(default=None, repr=False)  # of its key: the engine knows the prompt under it alone
    tokens: int = 0  # of the prompt; 0: not known yet
    fates: dict[str, Fate] = field(default_factory=dict)  # by the worker's address

    def fate(self, worker: Worker) -> str:
        """What became of it at `worker` as it runs now."""
        fate = self.fates.get(worker.url)
        return fate.word if fate is not None and fate.boot == worker.boot else WAITING

    def is_due(self, worker: Worker) -> bool:
        word = self.fate(worker)
        return worker.serves(self.model) and (word == WAITING or (word in _PASSING and self._may_ask(worker)))

    def is_to_go(self, worker: Worker) -> bool:
        """Whether it is to be released at `worker` now, if it is to be released at all."""
        return self.fate(worker) == PINNED and self._may_ask(worker)

    def _may_ask(self, worker: Worker) -> bool:
        return time.monotonic() >= self.fates[worker.url].again_at


@dataclass(eq=False)
class PinnedPrompts(Part):
    name = "pinned_prompts"

    _settings: Settings
    _pool: WorkerPool
    _keys: KeyRing | None
    _reader: PromptReader
    _replayer: Replayer
    _prompts: dict[str, PinnedPrompt] = field(default_factory=dict)
    _released: list[PinnedPrompt] = field(default_factory=list)  # their blocks are still to be let go
    # By the worker's address: its pins come and go one batch at a time.
    _turns: dict[str, asyncio.Lock] = field(default_factory=dict)
    file: WatchedFile[list[PinEntry]] | None = None

    def __post_init__(self) -> None:
        """Raises `SettingsError` for a file that cannot be used."""
        if (path := self._settings.prefixes_file) is not None:
            self.file = WatchedFile("prefixes_file", path, self._read, EXAMPLE)
            self._load(self.file.value)

    def __len__(self) -> int:
        return len(self._prompts)

    def as_json(self) -> list[dict[str, Any]]:
        """All prompts by name; lengths in tokens. Nothing of their texts."""
        return [self._shown(prompt) for _, prompt in sorted(self._prompts.items())]

    async def add(self, raw: bytes) -> dict[str, Any]:
        """Pin the prompt in the body of a request at every worker that is up; what became of it.

        A prompt that has the name already is released. Raises `BadRequest`, or `PinRefused` if there is room nowhere.
        """
        try:
            entry = PinEntry.model_validate(parse_object(raw, *self._settings.json_limits))
        except ValidationError as error:
            first = error.errors()[0]
            where = str(first["loc"][0]) if first["loc"] else None
            raise BadRequest(f"{complaint_of(first)}.", param=where) from None
        prompt = self._prompt(entry)
        previous = self._prompts.get(entry.name)
        if previous is not None and previous.from_file:
            raise BadRequest(f"The prompt {entry.name!r} stands in prefixes_file: change it there.", param="name")
        others = [each for each in self._prompts.values() if each is not previous]
        if len(others) >= MOST_PROMPTS:
            raise BadRequest(f"{MOST_PROMPTS} prompts are pinned already, and no more can be: unpin one.", param="name")
        if sum(len(each.raw) for each in (*others, prompt)) > MOST_BYTES:
            raise BadRequest(f"All pinned prompts together may have {MOST_BYTES:,} bytes.", param="body")
        self._put(prompt)
        await self.make_all()
        if {prompt.fate(worker) for worker in self._pool.up if worker.serves(prompt.model)} == {NO_ROOM}:
            self._drop(entry.name)
            raise PinRefused(f"The prompt was not pinned: {WORDS[NO_ROOM]}.")
        return self._shown(prompt)

    async def remove(self, name: str) -> dict[str, Any]:
        """Let a prompt go. Raises `NotFound`, or `BadRequest` for one of the file."""
        prompt = self._prompts.get(name)
        if prompt is None:
            raise NotFound("No prompt of this name is pinned.")
        if prompt.from_file:
            raise BadRequest(f"The prompt {name!r} stands in prefixes_file: take it out there.", param="name")
        self._drop(name)
        await self.make_all()
        return self._shown(prompt)

    def refresh(self) -> None:
        if self.file is not None and self.file.refresh():
            self._load(self.file.value)

    def on_worker(self, worker: Worker, change: Change, model: str = "") -> None:
        """What a worker held is gone with its cache, and what it held of an adapter with that."""
        if change is Change.REMOVED:
            self._turns.pop(worker.url, None)
        if change in (Change.REMOVED, Change.CLEARED, Change.ADAPTER):
            for prompt in self._prompts.values():
                if change is not Change.ADAPTER or prompt.model == model:
                    prompt.fates.pop(worker.url, None)

    async def prepare(self, worker: Worker) -> None:
        if worker.takes_hints:
            await self.make(worker)

    async def run(self) -> None:
        while True:
            await asyncio.sleep(POLL_SECONDS)
            await self.make_all()

    async def make_all(self) -> None:
        async with asyncio.TaskGroup() as group:
            for worker in self._pool.up:
                group.create_task(self.make(worker))

    async def make(self, worker: Worker) -> None:
        async with self._turns.setdefault(worker.url, asyncio.Lock()):
            for prompt in self._prompts.values():
                if prompt.key is not None and prompt.key.salt != prompt.salt:  # the key is in another group now:
                    self._released.append(replace(prompt))  # what is pinned under its old salt is to go
                    prompt.salt, prompt.fates = prompt.key.salt, {}
            for prompt in [prompt for prompt in self._released if prompt.is_to_go(worker)]:
                await self._send(prompt, worker, pin=False)
            self._released = [prompt for prompt in self._released if self._is_held(prompt)]
            due = [prompt for prompt in self._prompts.values() if prompt.is_due(worker)]
            if due and worker.takes_hints:
                await replay_all(due, lambda prompt: self._send(prompt, worker, pin=True))

    async def let_go(self) -> None:
        """Release, before the gateway stops, what nobody could release after it: its keys will have other salts."""
        if self._keys is None or self._keys.salts_last:
            return
        for name in list(self._prompts):
            self._drop(name)
        with suppress(TimeoutError):
            async with asyncio.timeout(STOP_SECONDS):
                await self.make_all()
        if held := sum(map(self._is_held, self._released)):
            logger.warning("%d prompts stay pinned until workers restart: salt_secret_file keeps salts", held)

    def _is_held(self, prompt: PinnedPrompt) -> bool:
        return any(prompt.fate(worker) == PINNED for worker in self._pool.workers)

    async def _send(self, prompt: PinnedPrompt, worker: Worker, *, pin: bool) -> None:
        """Have the worker pin a prompt, or release it, and note what became of that."""
        boot, salt = worker.boot, prompt.salt
        try:
            word = await self._ask(prompt, worker, pin=pin)
        except (Unreachable, Broken):
            word = FAILED
        except Exception as error:  # the kind alone: the message might hold prompt text
            logger.error("pinned prompt %s at worker %s: %s", prompt.name, worker.name, type(error).__name__)
            word = FAILED
        later = time.monotonic() + RETRY_SECONDS
        fate = Fate(boot, word, later if word in _PASSING else 0.0)
        if word != PINNED and pin:
            logger.warning("prompt %s is not pinned at worker %s: %s", prompt.name, worker.name, WORDS.get(word, word))
        if not pin and word in _PASSING:
            if (held := prompt.fates.get(worker.url)) is not None:  # else its cache is gone meanwhile
                prompt.fates[worker.url] = held._replace(again_at=later)
            logger.warning("prompt %s is not released at worker %s: %s", prompt.name, worker.name, WORDS[word])
        elif pin and prompt.salt != salt:  # its key is in another group meanwhile
            self._released.append(replace(prompt, salt=salt, fates={worker.url: fate}))
        elif pin:
            prompt.fates[worker.url] = fate
            if self._prompts.get(prompt.name) is not prompt and prompt not in self._released:
                self._released.append(prompt)  # it was let go meanwhile
        else:
            prompt.fates.pop(worker.url, None)
            for other in self._prompts.values():  # there is room again, and the same prompt may have another name
                if other.fate(worker) == NO_ROOM or (other.raw, other.salt) == (prompt.raw, prompt.salt):
                    other.fates.pop(worker.url, None)

    async def _ask(self, prompt: PinnedPrompt, worker: Worker, *, pin: bool) -> str:
        scope = {"method": "POST", "path": CHAT, "query_string": b"", "headers": []}
        key = prompt.key
        if key is not None:  # what is pinned is kept, and let go under the salt that it was pinned with
            key = replace(key, salt=prompt.salt or "", entry=key.entry.model_copy(update={"keep": None}))
        exchange, settings = exchange_of(scope, prompt.raw, prompt.name, key), self._settings
        body, parsed = exchange.body, parse_object(prompt.raw, *settings.json_limits)
        body.memory = memory_of(parsed, len(prompt.raw), settings.max_boundary_values)
        exchange.take(parsed, asks_usage=False)
        found = await self._reader.find_beside(exchange, worker)
        if not worker.hint(found):
            return NO_FACTS
        put = {name: value for name, value in body.put.items() if name == "cache_salt"}
        replay = WarmupRequest(CHAT, body.raw, body.names, put, found.without_request(), prompt.model)
        answer = await self._replayer.send(worker, replay, pin=pin)
        if answer.status != 200:
            return FAILED
        if (usage := answer.usage) is not None:
            prompt.tokens = usage.prompt or prompt.tokens
        return answer.pin or UNTOLD

    def _prompt(self, entry: PinEntry, *, from_file: bool = False) -> PinnedPrompt:
        """Raises `BadRequest`."""
        model, messages = entry.body.get("model"), entry.body.get("messages")
        if not isinstance(model, str) or not model:
            raise BadRequest("body.model: name the model whose prompt it is.", param="body")
        if not isinstance(messages, list) or not messages or not all(isinstance(each, dict) for each in messages):
            raise BadRequest("body.messages: a chat request has a list of messages.", param="body")
        key = None
        if self._keys is not None:
            key = self._keys.named(entry.key) if entry.key is not None else None
            if key is None:
                raise BadRequest("key: name the API key, from the keys file, whose cache it is for.", param="key")
        elif entry.key is not None:
            raise BadRequest("key: this gateway has no API keys.", param="key")
        try:
            raw = json.dumps(entry.body, allow_nan=False).encode()
            parse_object(raw, *self._settings.json_limits)
        except (ValueError, RecursionError):
            text = "body: it is no JSON that a worker reads: NaN and infinite numbers are none."
            raise BadRequest(text, param="body") from None
        return PinnedPrompt(entry.name, model, raw, key, from_file, key.salt if key is not None else None)

    def _put(self, prompt: PinnedPrompt) -> None:
        self._drop(prompt.name)
        self._prompts[prompt.name] = prompt

    def _drop(self, name: str) -> None:
        if (prompt := self._prompts.pop(name, None)) is not None:
            self._released.append(prompt)

    def _read(self, raw: bytes, where: str) -> list[PinEntry]:
        """The file's prompts, each of which can be pinned. Raises `SettingsError`."""
        try:
            entries = _FILE.validate_json(raw)
        except ValidationError as error:
            raise SettingsError(f"{where}: {complaint_of(error.errors()[0])}") from None
        for name, times in Counter(entry.name for entry in entries).items():
            if times > 1:
                raise SettingsError(f"{where}: two prompts are called {name!r}")
        if len(entries) > MOST_PROMPTS:
            raise SettingsError(f"{where} names {len(entries)} prompts; {MOST_PROMPTS} can be pinned")
        size = 0
        for entry in entries:
            try:
                size += len(self._prompt(entry).raw)
            except BadRequest as error:
                raise SettingsError(f"{where}: {entry.name!r}: {error}") from None
        if size > MOST_BYTES:
            raise SettingsError(f"{where}: all prompts together may have {MOST_BYTES:,} bytes")
        return entries

    def _load(self, entries: Iterable[PinEntry]) -> None:
        named = {entry.name: self._prompt(entry, from_file=True) for entry in entries}
        for prompt in list(self._prompts.values()):
            new = named.get(prompt.name)
            if new is None and prompt.from_file:
                self._drop(prompt.name)
            elif new is not None and (new.raw, new.key) == (prompt.raw, prompt.key):
                prompt.from_file = True
                del named[prompt.name]
        for prompt in named.values():
            self._put(prompt)

    def _shown(self, prompt: PinnedPrompt) -> dict[str, Any]:
        fates = {worker.name: prompt.fate(worker) for worker in self._pool.workers}
        if self._prompts.get(prompt.name) is not prompt:
            fates = {name: NOT_RELEASED if word == PINNED else RELEASED for name, word in fates.items()}
        return {
            "name": prompt.name,
            "model": prompt.model,
            "key": prompt.key.name if prompt.key is not None else None,
            "tokens": prompt.tokens,
            "from_file": prompt.from_file,
            "workers": fates,
        }
