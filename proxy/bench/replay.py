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
from collections import defaultdict
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Annotated

import msgspec

from proxy.bench.harness.client import Messages
from proxy.bench.harness.prompts import prose
from proxy.bench.mine import AskedRequest, MinedRow, Stack, Unusable, key_in, parser_of, say
from proxy.bench.shapes import message
from proxy.errors import SettingsError


class Recorded(msgspec.Struct):
    """One request; lengths in tokens."""

    timestamp: float  # milliseconds since the trace's start
    input_length: Annotated[int, msgspec.Meta(ge=1)]
    output_length: int
    hash_ids: list[int]
    session: str | int | None = None  # whose requests are sent one after the other
    shared: int = 0  # with earlier requests; as what follows, worked out by `share`
    beginnings: list[int] = []  # names of all that it begins with, a block longer each


def read(path: Path) -> list[Recorded]:
    """A trace, gzipped or not, in the order of its times. Raises `Unusable`."""
    found, decode = list[Recorded](), msgspec.json.Decoder(Recorded).decode
    try:
        with (gzip.open if path.suffix == ".gz" else open)(path, "rb") as file:
            found.extend(map(decode, file))
    except (OSError, EOFError, ValueError) as error:
        raise Unusable(f"{path}, line {len(found) + 1}: {error}. A trace has a JSON object on each line.") from None
    if not found:
        raise Unusable(f"{path} is empty: give a file with a JSON object on each line")
    return sorted(found, key=lambda each: each.timestamp)


class Replay:
    """A trace that is sent to a stack."""

    def __init__(self, stack: Stack, requests: Sequence[Recorded]) -> None:
        # Files do not say how long a block is, and the last one of a prompt may be shorter.
        longest = max(math.ceil(each.input_length / max(1, len(each.hash_ids))) for each in requests)
        self.stack, self._requests, self._block = stack, requests, 1 << (longest - 1).bit_length()
        self._run = secrets.randbits(64)
        self._sessions = defaultdict[object, list[Recorded]](list)
        self._took: list[float] = []  # seconds of each session that was answered to its end
        names, followers = dict[tuple[int, int], int](), defaultdict[int, set[int]](set)
        ends: dict[int, object] = {}  # sessions by where a prompt of theirs ended
        for each in requests:
            known, name, each.beginnings = len(names), 0, []
            for block in each.hash_ids:
                before, name = name, names.setdefault((name, block), len(names) + 1)
                followers[before].add(name)
                each.beginnings.append(name)
            followers[name].add(0)
            each.shared = min(sum(name <= known for name in each.beginnings) * self._block, each.input_length - 1)
            went_on = next((ends[name] for name in reversed(each.beginnings) if name in ends), object())
            session = went_on if each.session is None else each.session
            self._sessions[session].append(each)
            ends |= dict.fromkeys(each.beginnings[-2:], session)
        self._parting = {name for name, behind in followers.items() if len(behind) > 1}
        self._theoretical = sum(each.shared for each in requests) / sum(each.input_length for each in requests)

    def messages(self, request: Recorded) -> Messages:
        """The request as a chat of about as many tokens."""
        left, words = request.input_length, self.stack.words_per_token
        texts: list[list[str]] = [[]]
        for name in request.beginnings:
            texts[-1].append(_text(self._run + name, min(self._block, left) * words))
            left -= self._block
            if name in self._parting and name != request.beginnings[-1]:
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
            began = time.perf_counter() - self._requests[0].timestamp / 1e3 / speed
            await asyncio.gather(*(self._send(requests, began, speed) for requests in self._sessions.values()))
        finally:
            await self.stack.client.aclose()
        if not self.stack.asked:
            raise Unusable(next(iter(self.stack.failed.values())))
        return self._table(bound)

    async def _send(self, requests: Sequence[Recorded], began: float, speed: float) -> None:
        first, stack = math.inf, self.stack
        for each in requests:
            chat = self.messages(each)
            await asyncio.sleep(began + each.timestamp / 1e3 / speed - time.perf_counter())
            sent = time.perf_counter()
            first = min(first, sent)
            try:
                reply = await stack.ask(chat, max(1, each.output_length), asyncio.Event())
            except Unusable as error:
                stack.failed["request", round(each.timestamp)] = str(error)
                return
            shared = round(each.shared / each.input_length * reply.prompt_tokens)
            stack.asked.append(AskedRequest("trace", each.input_length, 0, 0, 0, shared, sent, reply))
        self._took.append(time.perf_counter() - first)

    def _table(self, bound: float | None) -> str:
        stack, asked, row = self.stack, self.stack.asked, MinedRow(self.stack.asked)
        prompts = sum(each.reply.prompt_tokens for each in asked)
        cached = sum(each.reply.cached_tokens or 0 for each in asked)
        lasted = max(each.sent + each.reply.last_token for each in asked) - min(each.sent for each in asked)
        achieved = f"{cached / prompts:.1%}: {row.part:.1%} of {row.shared:,} tokens that could be found"
        achieved = achieved if stack.reported else "not reported"
        lines = [
            f"{stack.shown}, model {stack.model}: {len(asked)} requests, {prompts:,} tokens of prompts, {lasted:.1f} s",
            f"cache reads   theoretical {self._theoretical:.1%}   achieved {achieved}",
            f"first token   {_percentiles([each.reply.first_token for each in asked])}",
            f"session       {_percentiles(self._took)}, {len(self._took)} answered to their end",
        ]
        if bound is not None:
            rate, part = len(asked) / lasted, row.within(bound)
            within = f"{part:.0%} of first tokens came within {bound:g} s"
            lines.append(f"goodput       {rate * part:.2f} of {rate:.2f} requests/s: {within}")
        return "\n".join([*lines, *(f"request at {at} ms: {why}" for (_, at), why in sorted(stack.failed.items()))])


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
    return int(bool(replay.stack.failed))
