"""The response cache: whole answers for requests that come again, and executions that several requests share.

An answer stands for as long as the worker that computed it is the same: a restart, another model under the name, or
another template voids it. Answers of adapters, which change under their names, are neither stored nor shared. Each
client counts at its own key, reads at its own pace, and waits for no other one's.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Callable, Iterable
from typing import Any

from proxy.errors import GatewayError, KeyBusy, Overloaded, Stopping
from proxy.fleet.part import Change, Part
from proxy.fleet.worker import Worker
from proxy.http import asgi
from proxy.metrics import Metrics
from proxy.pipeline.cacheable import HEADER, KEPT, Ending, may_keep
from proxy.pipeline.dispatch import Lease
from proxy.pipeline.request import ProxiedRequest
from proxy.pipeline.sse import HEARTBEAT
from proxy.pipeline.stored_answers import PIECE_BYTES, Entry, Source, StoredAnswers, from_piece, grouped, weight_of

SECRET_BYTES = 32

# What an execution may hold of an answer that is not kept, whether the cache has room or not, and beside its bound: two
# pieces for one reader, and so much for several.
SLACK_BYTES = 4 * PIECE_BYTES

# Pieces that are given back in one go.
MOST_FORGOTTEN = 512

# Seconds in all that an answer which the cache does not keep waits for them.
PATIENCE_SECONDS = 0.1

# The pieces of an answer up to this size are joined when it is stored, in one go.
JOINED_BYTES = 2**20


def has_fixed_weights(model: Any, workers: Iterable[Worker]) -> bool:
    """Whether `model` means a base model at all of `workers`, whose weights stay as long as a worker runs.

    An adapter's may be replaced at the worker in any moment. A name that nobody lists yet may be an adapter's.
    """
    if not model:  # a worker's base model
        return True
    cards = [entry for worker in workers for entry in worker.probed.models if entry.get("id") == model]
    return bool(cards) and not any(card.get("parent") for card in cards)


class ResponseCache(Part):
    """Stored answers, and those under way that may be stored."""

    name = "response_cache"

    def __init__(self, most: int, metrics: Metrics) -> None:
        """`most` bytes, answers under way included."""
        self.secret = os.urandom(SECRET_BYTES)
        self.count = metrics.response_cache_requests.labels
        self.answers = StoredAnswers(most, metrics.response_cache_evictions.inc)
        self._executions: dict[bytes, Execution] = {}  # that others may join
        self.voided = 0  # how many times answers were found to be void whatever they are
        metrics.response_cache_bytes.set_function(lambda: self.answers.size)
        metrics.response_cache_entries.set_function(lambda: len(self.answers))

    def hit(self, key: bytes, request: ProxiedRequest, max_age: float | None = None) -> Hit | None:
        """The stored answer, if it still stands and is not older than `max_age` seconds. It has to be closed."""
        answers = self.answers
        if (entry := answers.get(key)) is None:
            return None
        if not entry.source.is_still(request.model):
            answers.remove(key)
            return None
        if (worker := entry.source.worker).engine is not None and not worker.is_followed:
            return None  # its weights may be others by now; asked again, it tells
        if max_age is not None and time.monotonic() - entry.stored > max_age:
            return None
        return Hit(answers, key, entry, request) if answers.lend(key, entry) else None

    def void(self, boot: str | None = None) -> None:
        """Forget the answers of a worker's boot, or all; what is under way now is not stored either."""
        self.voided += 1
        self._executions.clear()
        self.answers.remove_all(boot)

    def on_worker(self, worker: Worker, change: Change, model: str = "") -> None:
        """What a worker answered before its cache was emptied may be of other weights."""
        if change in (Change.CLEARED, Change.DISTRUSTED):
            self.void(worker.boot)

    def execution(self, key: bytes, model: Any) -> Execution | None:
        """One that can be joined: of a worker that is still what it was when it got the request."""
        execution = self._executions.get(key)
        return execution if execution is not None and execution.source.is_still(model) else None

    def open(self, execution: Execution) -> None:
        """Others may join it from now on."""
        self._executions[execution.key] = execution

    def close(self, execution: Execution) -> None:
        """Nobody may join it any more."""
        if self._executions.get(execution.key) is execution:
            del self._executions[execution.key]


class Hit:
    """A stored answer that goes to one client."""

    result = b"hit"

    def __init__(self, answers: StoredAnswers, key: bytes, entry: Entry, request: ProxiedRequest) -> None:
        self._answers, self._key, self._request = answers, key, request
        self._entry: Entry | None = entry

    async def deliver(self, send: asgi.Send, watch: asgi.ClientWatch) -> bool:
        """Send it, with the time since it was computed (RFC 9111, 5.1). Always true: it is answered."""
        if (entry := self._entry) is None:
            raise RuntimeError("The stored answer was closed before it was sent.")
        try:
            age = (b"age", str(int(time.monotonic() - entry.stored)).encode())
            headers = [*entry.headers, age, self._request.client.id_header, (HEADER, self.result)]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            at = 0
            while at < len(entry.pieces):
                piece, at = from_piece(entry.pieces, at)
                more = at < len(entry.pieces)
                watch.over = not more
                await send({"type": "http.response.body", "body": piece, "more_body": more})
        finally:
            self.close()
        return True

    def close(self) -> None:
        """It is sent no more."""
        if self._entry is not None:
            self._answers.returned(self._key, self._entry)
            self._entry = None


class Reader:
    """One client's part in an execution, from the moment when it is let in."""

    def __init__(
        self, execution: Execution, request: ProxiedRequest, result: bytes, leave_key: Callable[[], None]
    ) -> None:
        """`leave_key`: un-counts it at its key, as often as it is called."""
        self.result = result
        self.request = request
        self.leave_key = leave_key
        self.at = 0  # pieces that it has
        self.taken = 0  # their bytes, as they are counted
        self.has_begun = False
        self.is_cut = False  # it fell too far behind
        self.scope: asyncio.Timeout | None = None  # inside which it reads
        self._execution: Execution | None = execution  # None: it reads no more

    async def deliver(self, send: asgi.Send, watch: asgi.ClientWatch) -> bool:
        """The answer from its beginning to its end, as it comes.

        Raises what the execution failed with, and `ClientGone` if the client fell too far behind the others. False if
        it got nothing for a reason that does not concern it, so that it has to ask again.
        """
        if self._execution is None:
            raise RuntimeError("The reader was closed before it was sent the answer.")
        return await self._execution.deliver(self, send, watch)

    def close(self) -> None:
        """It reads no more. Does nothing the second time."""
        execution, self._execution = self._execution, None  # which lead to each other
        try:
            self.leave_key()
        finally:
            if execution is not None:
                execution.left(self)


class Execution:
    """One request at a worker, and its answer so far, which each client that asked for it reads at its own pace.

    An answer that outgrows its share of the cache is kept no longer, and nobody else can join. Then the worker waits
    for the fastest of those that read, and whoever falls too far behind that one is cut off. It ends when nobody is
    left who reads it. All that it holds is counted, but for a few pieces of an answer that is not kept: who does not
    read them must not take the room of stored ones.
    """

    def __init__(self, cache: ResponseCache, key: bytes, lease: Lease) -> None:
        """`lease` has its slot, which it keeps until the execution is over."""
        request = lease.request
        self.key = key
        self.watch = asgi.ClientWatch({}, _nothing)  # stands for all clients; never entered
        self.source = Source.of(lease.worker, request.model)  # as it was when it got the request
        self._cache = cache
        self._answers = cache.answers
        self._lease = lease
        self._request = request
        self._owner = request.client.owner
        self._voided = cache.voided
        self._task: asyncio.Task[None] | None = None  # under way
        self._is_over = False
        self._head: asgi.Scope | None = None
        self._ending: Ending | None = None
        self._pieces: list[bytes] = []
        self._heartbeats: list[int] = []  # where there are comments among the pieces of an answer that is kept
        self._total = 0  # bytes of all pieces, as they are counted
        self._gone = 0  # pieces that all have read, and that are not kept
        self._size = 0  # bytes of what it holds, as they are counted
        self._slack = 0  # the same of what it holds beside the cache's bound
        self._lent: Entry | None = None  # holds them in its place
        self._is_kept = True
        self._is_whole = False
        self._failure = 0  # status of what went wrong behind the head; 0: nothing
        self._is_stopping = False
        self._error: BaseException | None = None
        self._readers: set[Reader] = set()
        self._patience = PATIENCE_SECONDS  # left
        self._turn = asyncio.Lock()  # of a part: a comment on a silent stream is no piece of an event
        self._news = asyncio.Event()  # for readers
        self._taken = asyncio.Event()  # for the worker: a reader has come further, or left
        self.own = self._let_in(request, b"miss", lease.leave_key)  # its first client
        cache.open(self)

    def join(self, request: ProxiedRequest, leave_key: Callable[[], None]) -> Reader:
        """Another client, which counts at its own key until it calls `leave_key`."""
        return self._let_in(request, b"joined", leave_key)

    def begin(self, task: asyncio.Task[None]) -> None:
        """`task` has the worker answer to `send`."""
        self._task = task
        task.add_done_callback(self._over)

    async def ended(self) -> None:
        """Wait for its end. If that is cancelled, so is the execution. One that was not begun is given up."""
        if self._is_over:
            return
        if self._task is None:
            self._is_over = True
            self._cache.close(self)
            self._error = Overloaded("The request that was to be answered has been given up.")
            self.own.close()
            self._tell()
            return
        try:
            await asyncio.wait((task := self._task,))
        except asyncio.CancelledError:
            task.cancel()
            raise

    async def send(self, message: asgi.Scope) -> None:
        """The next part of the answer, as ASGI has it."""
        if message["type"] == "http.response.start":
            self._head = message
            kind = next((value for name, value in message["headers"] if name == b"content-type"), b"")
            client, asked = self._request.client, self._request.body.parsed
            self._ending = Ending(client.path, asked, kind.startswith(b"text/event-stream"))
        else:
            body = message.get("body", b"")
            async with self._turn:
                if self._is_whole:  # a comment that had to wait until the end was out
                    return
                for at in range(0, len(body), PIECE_BYTES):
                    await self._add(body[at : at + PIECE_BYTES])
                if not message.get("more_body", False):
                    self._is_whole = True
                    self._failure = self._request.reply.failure  # from now on it may be that of its client, who leaves
        self._tell()

    def left(self, reader: Reader) -> None:
        """One that reads no more."""
        self._readers.discard(reader)
        self._taken.set()
        if not self._readers:
            self._leave()

    async def deliver(self, reader: Reader, send: asgi.Send, watch: asgi.ClientWatch) -> bool:
        """As `Reader.deliver` says."""
        try:
            async with asyncio.timeout(None) as reader.scope:
                await self._pass_on(reader, send, watch)
        except TimeoutError:
            if not reader.is_cut:
                raise
            if reader.has_begun or reader is self.own:
                raise asgi.ClientGone from None
            return False
        except asyncio.CancelledError:
            task = self._task
            if not watch.gone and (task is not None or self._is_over):  # the server stops, and the stream has to say so
                if task is not None and not self._is_stopping:  # a second time would cut off what it says at its end
                    self._is_stopping = True
                    self._taken.set()  # nothing waits for readers any more
                    task.cancel()
                if task is not None:
                    await asyncio.wait((task,))
                with contextlib.suppress(Exception):
                    await self._pass_on(reader, send, watch)
            raise
        except (KeyBusy, Overloaded):
            if reader is not self.own and not reader.has_begun:
                return False
            raise
        finally:
            watch.over = watch.over or reader is self.own  # that it leaves while others read on ends nothing
            reader.scope = None
            reader.close()
        return True

    def _let_in(self, request: ProxiedRequest, result: bytes, leave_key: Callable[[], None]) -> Reader:
        reader = Reader(self, request, result, leave_key)
        self._readers.add(reader)
        return reader

    async def _pass_on(self, reader: Reader, send: asgi.Send, watch: asgi.ClientWatch) -> None:
        request, is_own = reader.request, reader is self.own
        with contextlib.nullcontext() if is_own else request.timings.waiting():
            while self._head is None:
                await self._next()
        if reader.is_cut:
            raise TimeoutError
        if not reader.has_begun:
            reader.has_begun = True
            headers = self._head["headers"]
            if not is_own:
                headers = [*_kept(headers), request.client.id_header]
            await send({**self._head, "headers": [*headers, (HEADER, reader.result)]})
        while True:
            if reader.is_cut:  # what it lacks is gone
                raise TimeoutError
            begin = reader.at - self._gone
            body, end = from_piece(self._pieces, begin)
            is_last = self._is_whole and end == len(self._pieces)
            if not body and not is_last:
                await self._next()
                continue
            if is_last:
                watch.over = True
                if self._failure:
                    request.reply.failed(self._failure)
            size = sum(map(weight_of, self._pieces[begin:end]))
            await send({"type": "http.response.body", "body": body, "more_body": not is_last})
            reader.at += end - begin
            reader.taken += size
            self._taken.set()
            if is_last:
                return

    async def _next(self) -> None:
        """Wait for more. Raises what the execution failed with."""
        if self._error is not None:
            raise self._error
        await self._news.wait()

    def _tell(self) -> None:
        self._news.set()
        self._news = asyncio.Event()

    async def _progress(self) -> None:
        """Wait until a reader has come further, or left."""
        self._taken.clear()
        await self._taken.wait()

    async def _add(self, piece: bytes) -> None:
        size = weight_of(piece)
        if self._is_kept and not self._fits(size):
            self._is_kept = False
            self._cache.close(self)
        if not self._is_kept:
            await self._make_way(size)
        elif piece == HEARTBEAT:
            self._heartbeats.append(len(self._pieces))
        elif self._ending is not None:
            self._ending.see(piece)
        self._pieces.append(piece)
        self._total += size
        self._tell()

    def _fits(self, size: int) -> bool:
        """Whether the cache has room for so many bytes more; they are taken."""
        if self._size + size > self._answers.largest or not self._answers.take(self._owner, size):
            return False
        self._size += size
        return True

    async def _make_way(self, size: int) -> None:
        """Take the room for a piece of an answer that is not kept, once somebody is near its end."""
        while not self._is_stopping and self._readers:
            if self._forget_read():
                await asyncio.sleep(0)
            elif self._total - max(reader.taken for reader in self._readers) > PIECE_BYTES:
                await self._progress()
            elif self._size + self._slack + size <= SLACK_BYTES:
                break
            elif self._fits(size):
                return
            elif self._patience > 0:  # others hold what is counted, by more than the one that is near the end
                began = time.monotonic()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(self._patience):
                        await self._progress()
                self._patience -= time.monotonic() - began
            else:
                self._cut_off(min(self._readers, key=lambda reader: reader.at))
        self._slack += size

    def _forget_read(self) -> bool:
        """Give back what all have read of an answer that is not kept. Whether there is more of it."""
        read = min(reader.at for reader in self._readers) - self._gone
        now = min(read, MOST_FORGOTTEN)
        self._free(sum(map(weight_of, self._pieces[:now])))
        del self._pieces[:now]
        self._gone += now
        return now < read

    def _cut_off(self, reader: Reader) -> None:
        """It holds up others."""
        reader.is_cut = True
        self._readers.discard(reader)
        if reader.scope is not None:
            reader.scope.reschedule(asyncio.get_running_loop().time())

    def _leave(self) -> None:
        """Nobody reads any more."""
        self._cache.close(self)
        if self._task is None:
            self._forget()
        elif not self._is_whole:
            self.watch.gone = True
            self._task.cancel()

    def _forget(self) -> None:
        """Nobody needs it any more. An error leads back here by its traceback."""
        self._give_back()
        self._pieces.clear()
        self._error = None

    def _over(self, task: asyncio.Task[None]) -> None:
        self._task, self._is_over = None, True
        with contextlib.ExitStack() as then:  # from the last one up; each whatever happens to the others
            then.callback(self._lease.release)  # now that those who wait for a slot find the answer
            for reader in self._readers:
                then.callback(reader.leave_key)
            then.callback(self._tell)
            if not self._readers:
                then.callback(self._forget)
            self._cache.close(self)
            if task.cancelled():
                self._error = Stopping("The gateway is stopping.")
            elif (error := task.exception()) is not None:
                self._error = error
            elif not self._is_whole:
                self._error = GatewayError("The gateway failed to handle this request.")
            elif self._may_be_stored():
                self._store()

    def _may_be_stored(self) -> bool:
        """Whether the answer may be given to anyone else."""
        request, source, head = self._request, self.source, self._head
        if not self._is_kept or self._voided != self._cache.voided or self._failure:
            return False
        if request.worker is not source.worker or not source.is_still(request.model):
            return False
        if head is None or head["status"] != 200 or not may_keep(head["headers"]):
            return False
        return self._ending is not None and self._ending.is_final

    def _store(self) -> None:
        """Its bytes are the entry's from now on, as far as nobody else reads them."""
        pieces, weight = [*self._pieces], self._total  # as it was kept, nothing of it has gone
        for at in reversed(self._heartbeats):
            weight -= weight_of(pieces.pop(at))
        if not self._readers and weight <= JOINED_BYTES:
            pieces = [*grouped(pieces)]
            weight = sum(map(weight_of, pieces))
        headers = [] if self._head is None else _kept(self._head["headers"])
        source = Source.of(self.source.worker, self._request.model)
        entry = Entry(headers, tuple(pieces), source, self._owner, weight)
        size = self._size
        self._give_back()
        if self._answers.add(self.key, entry) and (not self._readers or self._answers.lend(self.key, entry)):
            self._lent = entry if self._readers else None
        elif self._readers:
            self._answers.hold(self._owner, size)
            self._size = size

    def _free(self, size: int) -> None:
        """Give back so many bytes, first those beside the bound."""
        beside = min(size, self._slack)
        self._slack -= beside
        self._size -= size - beside
        self._answers.hold(self._owner, beside - size)

    def _give_back(self) -> None:
        """All that it holds."""
        self._free(self._size + self._slack)
        if self._lent is not None:
            self._answers.returned(self.key, self._lent)
            self._lent = None


def _kept(headers: asgi.HeaderList) -> asgi.HeaderList:
    """Those headers of an answer that are the same for all who get it."""
    return [header for header in headers if header[0] in KEPT]


async def _nothing() -> asgi.Scope:
    return {"type": "http.disconnect"}


def marked(send: asgi.Send, result: bytes) -> asgi.Send:
    """`send`, with the response cache's header in the answer's head."""

    async def send_marked(message: asgi.Scope) -> None:
        if message["type"] == "http.response.start":
            message = {**message, "headers": [*message["headers"], (HEADER, result)]}
        await send(message)

    return send_marked
