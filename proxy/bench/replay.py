"""`seamark bench replay`: a trace in Mooncake's format, sent with made-up text that shares what its prompts share.

A block's name stands for one text, another one in each run. Prompts are conversations whose messages end where prompts
of the trace part, so that a server meets what it met when they were recorded.
"""

from __future__ import annotations

import asyncio
import gzip
import math
import secrets
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Annotated

import msgspec

from proxy.bench.harness.client import Messages, prose
from proxy.bench.mine import AskedRequest, MinedRow, Stack, Unusable, key_in, parser_of, say
from proxy.bench.shapes import message
from proxy.errors import SettingsError

AHEAD = 1.0  # seconds in which a prompt is written before it is sent


class Recorded(msgspec.Struct):
    """One request; lengths in tokens."""

    timestamp: float  # milliseconds since the trace's start
    input_length: Annotated[int, msgspec.Meta(ge=1, le=2**30)]
    output_length: int
    hash_ids: list[int]
    session: str | int | None = None  # whose requests are sent one after the other
    shared: int = 0  # with earlier ones, as `Replay` works it out


def read(path: Path) -> list[Recorded]:
    """A trace, gzipped or not, in the order of its times. Raises `Unusable`."""
    found, decode = list[Recorded](), msgspec.json.Decoder(Recorded).decode
    try:
        with (gzip.open if path.suffix == ".gz" else open)(path, "rb") as file:
            found.extend(map(decode, filter(bytes.strip, file)))
    except Exception as error:  # whatever the file is
        raise Unusable(f"{path}, line {len(found) + 1}: {error}. A trace has a JSON object on each line.") from None
    if not found:
        raise Unusable(f"{path} is empty: give a file with a JSON object on each line")
    return sorted(found, key=lambda each: each.timestamp)


class Replay:
    def __init__(self, stack: Stack, requests: Sequence[Recorded]) -> None:
        # Files do not say how long a block is: a power of two that suits most. A prompt's last one may be shorter.
        lengths = [(each.input_length, len(each.hash_ids)) for each in requests]
        self._block = max((2**bits for bits in range(17)), key=lambda size: sum(-(-a // size) == b for a, b in lengths))
        self.stack, self._requests, self._run = stack, requests, secrets.randbits(64)
        self._sessions = defaultdict[object, list[Recorded]](list)
        self._took: list[float] = []  # seconds of each session that was answered to its end
        names, last = dict[tuple[int, int], int](), set[int]()
        ends: dict[int, object] = {}  # sessions by where a prompt of theirs ended that was first there
        for each in requests:
            known, name = len(names), 0
            for at, block in enumerate(each.hash_ids):  # from here on, the name of all up to its end
                each.hash_ids[at] = name = names.setdefault((name, block), len(names) + 1)
            last.add(name)
            each.shared = min(sum(name <= known for name in each.hash_ids) * self._block, each.input_length - 1)
            found = (at for at in reversed(each.hash_ids) if at in ends)
            before = next((at for at in found if self._sessions[ends[at]][-1].input_length < each.input_length), 0)
            session = ends.pop(before, object()) if each.session is None else each.session
            self._sessions[session].append(each)
            ends |= dict.fromkeys((name for name in each.hash_ids[-2:] if name > known or name == before), session)
        followers = Counter(before for before, _ in names)
        self._parting = {name for name, count in followers.items() if count > 1 or name in last}
        self._theoretical = sum(each.shared for each in requests) / sum(each.input_length for each in requests)

    def messages(self, request: Recorded) -> Messages:
        """The request as a chat of about as many tokens."""
        left, words = request.input_length, self.stack.words_per_token
        texts: list[list[str]] = [[]]
        for name in request.hash_ids:
            texts[-1].append(_text(self._run + name, min(self._block, left) * words))
            left -= self._block
            if name in self._parting and name != request.hash_ids[-1]:
                texts.append([])
        if left > 0:
            texts[-1].append(_text(secrets.randbits(64), left * words))
        *shared, own = map(" ".join, texts)
        head = [message("system", text) for text in shared[:1]]
        # Templates want roles in turns, whatever a prompt goes on with.
        turns = [each for text in shared[1:] for each in (message("user", text), message("assistant", "Yes."))]
        return *head, *turns, message("user", own)

    async def play(self, speed: float, bound: float | None) -> str:
        """What came of it. Raises `Unusable`."""
        try:
            await self.stack.find_model()
            await self.stack.probe()
            began = time.perf_counter() + AHEAD - self._requests[0].timestamp / 1e3 / speed
            await asyncio.gather(*(self._send(requests, began, speed) for requests in self._sessions.values()))
        except asyncio.CancelledError:
            self.stack.failed["interrupted", 0] = "interrupted before all was answered"
        finally:
            await self.stack.client.aclose()
        if not self.stack.asked:
            raise Unusable(next(iter(self.stack.failed.values())))
        return self._table(bound)

    async def _send(self, requests: Sequence[Recorded], began: float, speed: float) -> None:
        for each in requests:
            at = began + each.timestamp / 1e3 / speed
            await asyncio.sleep(at - AHEAD - time.perf_counter())
            chat = await asyncio.to_thread(self.messages, each)  # beside the answers that are timed
            await asyncio.sleep(at - time.perf_counter())
            sent = time.perf_counter()
            try:
                reply = await self.stack.ask(chat, max(1, each.output_length), asyncio.Event())
            except Unusable as error:
                self.stack.failed["session", len(self.stack.failed)] = str(error)
                return
            shared = round(each.shared / each.input_length * reply.prompt_tokens)
            self.stack.asked.append(AskedRequest("trace", each.input_length, 0, 0, 0, shared, sent, reply))
        self._took.append(time.perf_counter() - began - requests[0].timestamp / 1e3 / speed)

    def _table(self, bound: float | None) -> str:
        stack, asked, row = self.stack, self.stack.asked, MinedRow(self.stack.asked)
        prompts = sum(each.reply.prompt_tokens for each in asked)
        cached = sum(each.reply.cached_tokens or 0 for each in asked)
        lasted = max(each.sent + each.reply.last_token for each in asked) - min(each.sent for each in asked)
        achieved = f"{cached / prompts:.1%}: {row.part:.1%} of {row.shared:,} tokens that could be found"
        achieved = achieved if stack.reported else "not reported"
        sent = f"{len(asked):,} of {len(self._requests):,} requests answered"
        lines = [
            f"{stack.shown}, model {stack.model}: {sent}, {prompts:,} tokens of prompts, {lasted:.1f} s",
            f"cache reads   theoretical {self._theoretical:.1%}   achieved {achieved}",
            f"first token   {_percentiles([each.reply.first_token for each in asked])}",
            f"session       {_percentiles(self._took)}, {len(self._took)} answered to their end",
        ]
        if bound is not None:
            rate, part = len(asked) / lasted, row.within(bound)
            within = f"{part:.0%} of first tokens came within {bound:g} s"
            lines.append(f"goodput       {rate * part:.2f} of {rate:.2f} requests/s: {within}")
        failed = Counter(stack.failed.values()).most_common(10)
        return "\n".join([*lines, *(f"broken off    {count} x {why}" for why, count in failed)])


@lru_cache(maxsize=2**17)
def _text(name: int, words: float) -> str:
    """Of so many words on the average over all names."""
    return prose(max(1, int(words + name % 997 / 997)), name)


def _percentiles(seconds: Sequence[float]) -> str:
    ordered = sorted(seconds) or [math.nan]
    return "   ".join(f"p{part} {ordered[math.ceil(part / 100 * len(ordered)) - 1]:.3f} s" for part in (50, 90, 99))


def main(argv: list[str]) -> int:
    parser = parser_of("replay", "a recorded trace, sent with made-up text that shares as much")
    parser.add_argument("trace", type=Path, metavar="FILE", help="of seamark serve --trace, or another in that format")
    parser.add_argument("--speed", type=float, default=1.0, metavar="N", help="so many times the trace's pace")
    args = parser.parse_args(argv)
    if not args.speed > 0:
        parser.error("--speed above zero")
    try:
        replay = Replay(Stack(args.base_url, args.model, key_in(args.api_key_file)), read(args.trace))
        print(asyncio.run(replay.play(args.speed, args.bound)))
    except (SettingsError, Unusable) as error:
        say(f"seamark bench replay: {error}")
        return 1
    return 130 if ("interrupted", 0) in replay.stack.failed else int(bool(replay.stack.failed))
