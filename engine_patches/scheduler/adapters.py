"""LoRA adapters by their contents: whose weights computed a state, not whose name stands over it.

vLLM's block hash holds an adapter's name and path. Here it also holds what its workers have loaded from there. Where it
is not certain that this computes a request, the request finds nothing, and nobody finds what it leaves.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import math
import os
import secrets
import threading
import time
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any, NamedTuple

from engine_patches.footprint import ADAPTER, ADAPTERS, TAG
from engine_patches.ledger import CORE, KV_CACHE_MANAGER, KV_CACHE_UTILS, Function, Shape, cure
from engine_patches.settings import logger

CONFIG = "adapter_config.json"
WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin", "adapter_model.pt")  # vLLM loads the first that is there

LOOK_SECONDS = 0.5  # that an engine waits for what files say, and does nothing else meanwhile

# Of the two files: device, inode, size, and the times of the last changes. None: they cannot be read here.
Signature = tuple[tuple[int, ...], ...] | None
NOT_YET: Signature = ()  # they may be read here, and have not answered


class Key(NamedTuple):
    name: str
    path: str
    tag: str  # of the contents


class _Look(threading.Event):
    """A look at an adapter's files; set once it is over."""

    found: tuple[Signature, str] = None, ""  # as `_read` says
    seconds = math.inf  # that it took
    before: Signature = None  # of the files, before the workers read them

    def __init__(self, lora: Any, *, hashed: bool) -> None:
        super().__init__()
        self.lora, self._hashed = lora, hashed

    def take(self) -> None:
        """Take it; a file system or a hub may do whatever it likes."""
        began = time.monotonic()
        with contextlib.suppress(Exception):
            self.found = _read(self.lora, hashed=self._hashed)
        self.seconds = time.monotonic() - began
        self.set()


def _take_all(asked: SimpleQueue[_Look | None]) -> None:
    for look in iter(asked.get, None):
        look.take()


@dataclass(frozen=True, eq=False)
class Adapter:
    """What an engine's workers hold under one id, from one load to the next."""

    key: Key
    signature: Signature
    engine: Adapters  # all that are known of

    def computes(self, lora: Any) -> bool:
        """Whether it surely computes a request with this `LoRARequest`: changed files come into workers unasked."""
        if (lora.lora_name, lora.lora_path) != self.key[:2]:
            return False  # ids of several API servers can mean several adapters, of which the workers hold one
        if self.key in self.engine.doubtful or (now := self.engine.signature(lora)) == NOT_YET:
            return False
        if now != self.signature:
            self.engine.doubtful.add(self.key)
            if not lora.load_inplace:
                logger.warning(
                    "seamark: the files of adapter %s have changed since it was loaded: until it is loaded again, its "
                    "requests neither find nor leave anything in the cache",
                    lora.lora_name,
                )
        return now == self.signature


class Adapters:
    """Those of one engine, by id, for two threads. Others look at files: a mount that hangs holds up no requests."""

    def __init__(self) -> None:
        self.doubtful: set[Key] = set()  # what may stand over states of two contents, and no adapter is given (again)
        self._by_id: dict[int, Adapter] = {}
        self._hashing: dict[int, _Look] = {}  # by id, at files that the workers have loaded, or are to load
        self._threads: list[SimpleQueue[_Look | None]] = []  # that have nothing to do, each by what it is asked
        self._late: dict[str, _Look] = {}  # by path: the last one, if it was not over in time
        self._lock = threading.RLock()
        self._told: dict[str, Key] = {}  # by name: the key under which its states were last found

    def of(self, lora: Any) -> Adapter | None:
        """What computes a request with this vLLM `LoRARequest`; None if that is not certain."""
        with self._lock:
            if lora.lora_int_id not in self._by_id:  # vLLM loads it when the request runs
                if (signature := self.signature(lora)) == NOT_YET:
                    self._note(lora, None, "")  # whatever they are read as later, the workers may have read before
                    return None
                self._learn(lora, signature)
            self._settle(lora.lora_int_id)
            adapter = self._by_id[lora.lora_int_id]
            return adapter if adapter.computes(lora) else None

    def load(self, lora: Any, load: Callable[[Any], Any]) -> Any:
        """Have vLLM `load` an adapter, and note what it has read; vLLM's answer."""
        before, known = self.signature(lora), None  # after an error the workers hold who knows what
        try:
            answer = load(lora)
            known = None if before == NOT_YET else before
        finally:
            self._learn(lora, known)
        return answer

    def has_changed(self, adapter: Adapter) -> bool:
        """Whether states were found under this adapter's name before that are not found any more; said once."""
        before = self._told.get(adapter.key.name)
        self._told[adapter.key.name] = adapter.key
        return before not in (None, adapter.key)

    def signature(self, lora: Any) -> Signature:
        """As an adapter's files are now; `NOT_YET` if they are late, and until they have answered fast."""
        late = self._late.get(lora.lora_path)
        if late is not None and not late.is_set():
            return NOT_YET
        look = self._look(lora, LOOK_SECONDS if late is None or late.seconds < LOOK_SECONDS else 0.0)
        if not look.is_set():
            self._late[lora.lora_path] = look
            return NOT_YET
        self._late.pop(lora.lora_path, None)
        return look.found[0]

    def _look(self, lora: Any, seconds: float, *, hashed: bool = False) -> _Look:
        look = _Look(lora, hashed=hashed)
        try:
            thread = self._threads.pop()
        except IndexError:
            thread = SimpleQueue()
            threading.Thread(target=_take_all, args=(thread,), name="seamark-adapters", daemon=True).start()
        thread.put(look)
        if look.wait(seconds):
            self._threads.append(thread)
        else:
            thread.put(None)
        return look

    def _learn(self, lora: Any, before: Signature) -> None:
        """Have the files hashed that were as `before` when the workers read them; None: nobody knows what they read."""
        with self._lock:
            look = self._hashing.pop(lora.lora_int_id, None)
            if before is not None:
                if look is None or look.is_set() or repr(look.lora) != repr(lora):
                    look = self._look(lora, LOOK_SECONDS, hashed=True)
                look.lora, look.before = lora, before
                self._hashing[lora.lora_int_id] = look
            if not self._settle(lora.lora_int_id):
                self._note(lora, before, "")

    def _settle(self, number: int) -> bool:
        """Note what was hashed of the adapter with this id, if that is over."""
        look = self._hashing.get(number)
        if look is None or not look.is_set():
            return False
        del self._hashing[number]
        self._note(look.lora, *(look.found if look.found[0] == look.before else (None, "")))
        return True

    def _note(self, lora: Any, signature: Signature, contents: str) -> None:
        """The workers read an adapter with this signature; None: nobody knows what. No `contents`: not known (yet)."""
        key = Key(lora.lora_name, lora.lora_path, contents)
        with self._lock:
            known = self._by_id.get(lora.lora_int_id)
            if known is not None and (known.key, known.signature) == (key, signature) and key not in self.doubtful:
                return
            # Requests under way go on under the tags of before with the weights of now.
            for other in self._by_id.values():
                if other is known or (other.key[:2] == key[:2] and other.signature != signature):
                    self.doubtful.add(other.key)
            if not contents or key in self.doubtful:
                key = key._replace(tag=secrets.token_hex(16))
            if not contents:
                self.doubtful.add(key)
                logger.warning(
                    "seamark: what the workers hold of adapter %s is not certain, since its files cannot be read here "
                    "(yet) or loading them failed: its requests neither find nor leave anything in the cache",
                    lora.lora_name,
                )
            self._by_id[lora.lora_int_id] = Adapter(key, signature, self)


def _read(lora: Any, *, hashed: bool) -> tuple[Signature, str]:
    """The signature of files that are opened, so that a network's server is asked; if `hashed`, of their contents."""
    digest, signature = hashlib.sha256(repr(getattr(lora, "is_3d_lora_weight", False)).encode()), []
    try:
        if getattr(lora, "tensorizer_config_dict", None):  # vLLM can load from elsewhere then
            return None, ""
        folder = _folder(lora.lora_path)
        for names in ((CONFIG,), WEIGHTS):
            path = next(path for name in names if os.path.isfile(path := os.path.join(folder, name)))
            with open(path, "rb") as file:
                stat = os.fstat(file.fileno())
                signature.append((stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns))
                if hashed:
                    digest.update(os.path.basename(path).encode() + hashlib.file_digest(file, "sha256").digest())
    except (OSError, ValueError, StopIteration):
        return None, ""
    return tuple(signature), digest.hexdigest()


def _folder(path: str) -> str:
    """Where vLLM reads an adapter: one of a hub where its last download lies. `OSError` or `ValueError` if nowhere."""
    path = os.path.expanduser(path)
    if os.path.isabs(path) or os.path.exists(path):
        return path
    from huggingface_hub import snapshot_download

    return str(snapshot_download(path, local_files_only=True))


def is_alone(request: Any) -> bool:
    """Whether nobody can find what a request leaves in the cache."""
    return getattr(request, TAG, None) is not None and getattr(request, ADAPTER, None) is None


def adapter_name(request: Any) -> str | None:
    return getattr(getattr(request, "lora_request", None), "lora_name", None)


_asked: ContextVar[Adapters] = ContextVar("asked")  # by the engine whose request is being made


def _adapters(engine: Any) -> Adapters:
    adapters: Adapters = engine.__dict__.setdefault(ADAPTERS, Adapters())
    return adapters


def _name(request: Any, adapter: Adapter | None) -> None:
    """Hash a request by this adapter from now on; None: as no other."""
    setattr(request, ADAPTER, adapter)
    setattr(request, TAG, secrets.token_hex(16) if adapter is None else adapter.key.tag)
    if getattr(request, "block_hashes", None):
        request.block_hashes.clear()
        request.update_block_hashes()


adapter = functools.partial(
    cure,
    upstream="vllm#42125, #48352, #30931; vLLM warns of it when it loads in place",
    until="vLLM's block hashes hold what an adapter contains",
)


@adapter(
    "adapter-contents",
    f"{KV_CACHE_UTILS}:_gen_lora_extra_hash_keys",
    why="an adapter that is loaded again from its path is answered from what its old weights have computed",
    mentions=('return [("lora", lora_request.lora_name, lora_request.lora_path)]',),
    relies_on=(
        Shape(f"{KV_CACHE_UTILS}:generate_block_hash_extra_keys", mentions=("_gen_lora_extra_hash_keys(request)",)),
        Shape(f"{KV_CACHE_UTILS}:to_event_extra_keys", mentions=("key[1] for key in keys",)),
        Shape(
            "vllm.v1.request:Request.__init__",
            mentions=("self.block_hashes: list[BlockHash] = []", "self.lora_request = lora_request"),
        ),
        Shape("vllm.v1.request:Request.update_block_hashes", mentions=("self._block_hasher(self)",)),
    ),
)
def hash_contents(request: Any, *, original: Function) -> Any:
    """Replacement of `_gen_lora_extra_hash_keys`. In KV events vLLM goes on giving an adapter's name alone."""
    keys = original(request)
    if keys and not hasattr(request, TAG):
        adapters = _asked.get(None)
        _name(request, adapters.of(request.lora_request) if adapters is not None else None)
    return [(*key, getattr(request, TAG)) for key in keys]


@adapter(
    "adapter-of-request",
    f"{CORE}.preprocess_add_request",
    why="a request is hashed by the contents that its engine has loaded",
    mentions=("Request.from_engine_core_request(request, self.request_block_hasher)",),
)
def know_adapters_of_requests(self: Any, request: Any, *, original: Function) -> Any:
    """Replacement of `EngineCore.preprocess_add_request`, where requests get their hashes, beside the engine's loop."""
    token = _asked.set(_adapters(self))
    try:
        return original(self, request)
    finally:
        _asked.reset(token)


@adapter(
    "adapter-loads",
    f"{CORE}.add_lora",
    why="what a load has read is what the workers hold from then on",
    mentions=("self.model_executor.add_lora(lora_request)",),
    relies_on=(
        Shape(f"{CORE}.list_loras", "self"),
        Shape(
            "vllm.lora.worker_manager:LRUCacheWorkerLoRAManager.add_adapter",
            mentions=("lora_request.lora_int_id not in self.list_adapters()", "or lora_request.load_inplace"),
        ),
        Shape(
            "vllm.lora.lora_model:LoRAModel.from_local_checkpoint",
            mentions=("adapter_model.safetensors", "adapter_model.bin", "adapter_model.pt"),
        ),
    ),
)
def note_loads(self: Any, lora_request: Any, *, original: Function) -> Any:
    """Replacement of `EngineCore.add_lora`, through which every API server loads adapters, into every rank."""
    if not lora_request.load_inplace and lora_request.lora_int_id in self.list_loras():
        return original(self, lora_request)  # loads nothing
    answer = _adapters(self).load(lora_request, functools.partial(original, self))
    _tell(self, _adapters(self).of(lora_request))
    return answer


@adapter(
    "adapter-admission",
    f"{CORE}.add_request",
    why="a load may come between a request's hashes and its place in the queue, or with the request itself",
    parameters="self, request, request_wave",
    mentions=("self.scheduler.add_request(request)",),
)
def admit_by_adapter(self: Any, request: Any, *args: Any, original: Function, **kwargs: Any) -> Any:
    """Between a request's hashes and its place in the queue its adapter may have been loaded. And one that says
    `load_inplace` has vLLM read the files in each of its steps: here they are read before the first, if they are new.
    """
    lora = request.lora_request
    if lora is not None and request._block_hasher is not None:
        adapter = _loaded(self, request) if lora.load_inplace else _adapters(self).of(lora)
        if not hasattr(request, TAG) or adapter is not getattr(request, ADAPTER):
            _name(request, adapter)
        _tell(self, adapter)
    return original(self, request, *args, **kwargs)


def _loaded(engine: Any, request: Any) -> Adapter | None:
    import msgspec

    lora, adapters = request.lora_request, _adapters(engine)
    if adapters.of(lora) is None:
        try:
            engine.add_lora(lora)
        except Exception as error:  # vLLM comes to it in the request's first step, and says so
            logger.warning("seamark: adapter %s was not loaded: %s", lora.lora_name, type(error).__name__)
            return None
    request.lora_request = msgspec.structs.replace(lora, load_inplace=False)
    return adapters.of(lora)


def _tell(engine: Any, adapter: Adapter | None) -> None:
    states = getattr(getattr(engine.scheduler, "seamark", None), "states", None)
    if adapter is not None and _adapters(engine).has_changed(adapter) and states is not None:
        states.adapter_replaced(adapter.key.name)


@adapter(
    "adapter-lookup",
    f"{KV_CACHE_MANAGER}.get_computed_blocks",
    why="a load may come while a request waits, and before it is resumed",
    mentions=("request.block_hashes",),
)
@adapter(
    "adapter-lookup-connector",
    f"{KV_CACHE_MANAGER}.get_computed_blocks_for_connector",
    why="KV connectors look up in a way of their own",
    mentions=("request.block_hashes",),
)
def look_up_by_adapter(self: Any, request: Any, *args: Any, original: Function, **kwargs: Any) -> Any:
    adapter = getattr(request, ADAPTER, None)
    if adapter is not None and not adapter.computes(request.lora_request):
        _name(request, None)
    return original(self, request, *args, **kwargs)
