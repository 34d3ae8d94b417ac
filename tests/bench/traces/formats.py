"""Traces of requests, public or drawn: what each prompt shares with earlier ones, and where in it boundaries lie.

Two published formats are read; neither holds any text. A prompt is a chain of blocks with names, equal where everything
up to the block's end is equal.
"""

from __future__ import annotations

import gzip
import json
import math
import random
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from proxy.boundaries.boundary import Kind

BLOCK = 512  # tokens

MAX_PATH = 80  # places kept of a prompt on which earlier ones had boundaries: the first and the last ones

# What so many of a trace's sessions share is taken to be shared by everybody: a system prompt.
COMMON_SHARE = 1 / 30

COMMON_SESSIONS = 3

COMMON_BLOCKS = 128  # the longest that is looked for: more than 64k tokens


class BadTrace(Exception):
    """A file that is no trace; the message names the line and the cure."""


class Place(NamedTuple):
    """The end of a beginning of a prompt, where a state may be kept."""

    tokens: int
    kind: Kind
    name: int  # equal where that beginning is


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request; lengths in tokens, times in seconds."""

    session: int
    turn: int  # 0 for the first of its session
    arrival: float  # since the trace's start; 0 in a trace that says pauses instead
    pause: float  # after the answer before it
    prompt: int
    output: int
    blocks: tuple[int, ...]  # names of its full blocks
    boundaries: tuple[Place, ...]  # that a gateway finds in it, ascending
    path: tuple[Place, ...]  # these, and those of earlier requests on its way
    shareable: int  # up to the deepest boundary that an earlier request had on its way

    def copied(self, copy: int, common: frozenset[int]) -> TraceRequest:
        """The same request of another user, who shares with this one what is common to all."""
        if not copy:
            return self

        def renamed(name: int) -> int:
            return name if name in common else name + (copy << 44)

        boundaries, path = (
            tuple(at._replace(name=renamed(at.name)) for at in places) for places in (self.boundaries, self.path)
        )
        blocks = tuple(map(renamed, self.blocks))
        return replace(self, session=self.session + (copy << 44), blocks=blocks, boundaries=boundaries, path=path)


@dataclass(frozen=True)
class Trace:
    """Sessions, each its requests in order."""

    name: str
    sessions: tuple[tuple[TraceRequest, ...], ...]
    is_timed: bool  # requests arrive when the trace says; if not, some seconds after the answer before

    @property
    def requests(self) -> list[TraceRequest]:
        return [request for session in self.sessions for request in session]

    @property
    def span(self) -> float:
        """Seconds in which sessions begin. What they send later than that is as much as what came before, unseen."""
        return max(session[0].arrival for session in self.sessions) + 1.0

    def common(self) -> frozenset[int]:
        """Names of what is taken to be shared by copies of these sessions, too."""
        least = max(COMMON_SESSIONS, math.ceil(COMMON_SHARE * len(self.sessions)))
        counts: Counter[int] = Counter()
        for session in self.sessions:
            names = {name for request in session for name in request.blocks[:COMMON_BLOCKS]}
            counts.update(names | {place.name for request in session for place in request.path[:8]})
        return frozenset(name for name, count in counts.items() if count >= least)


class _Names:
    def __init__(self) -> None:
        self._names: dict[Hashable, int] = {}

    def of(self, *parts: Hashable) -> int:
        return self._names.setdefault(parts, len(self._names) + 1)

    def place(self, tokens: int, kind: Kind, *parts: Hashable) -> Place:
        return Place(tokens, kind, self.of(kind, *parts))


class _Row(NamedTuple):
    """A request as a trace has it."""

    stream: int | None  # the session, if the trace says it
    arrival: float
    pause: float
    prompt: int
    output: int
    blocks: tuple[int, ...]  # named by `_Names`
    head: int  # tokens of its system prompt; 0: none known
    end: Hashable  # tells apart prompts with equal blocks


def read(path: Path) -> Trace:
    """The trace in a file, gzipped or not, in the format that its first line has. Raises `BadTrace`."""
    try:
        lines = _lines(path)
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise BadTrace(f"{path} cannot be read: {error}. Give a .jsonl or .jsonl.gz file.") from None
    if not lines:
        raise BadTrace(f"{path} is empty: give a file with one JSON object a line.")
    if "requests" not in lines[0][1]:
        return of_mooncake(str(path), lines)
    names = _Names()
    return _with_boundaries(path.name, _claude_code(str(path), lines, names), names, is_timed=False)


def of_mooncake(name: str, lines: Sequence[tuple[int, dict[str, Any]]]) -> Trace:
    """A trace of numbered records in Mooncake's format, not empty. Without timestamps (Dynamo's) users set the pace.

    Raises `BadTrace`.
    """
    names, is_timed = _Names(), "timestamp" in lines[0][1]
    rows = _mooncake(name, lines, names, is_timed=is_timed)
    return _with_boundaries(Path(name).name, rows, names, is_timed=is_timed)


def _lines(path: Path) -> list[tuple[int, dict[str, Any]]]:
    found = []
    with (gzip.open if path.suffix == ".gz" else open)(path, "rt", encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            try:
                row = json.loads(line)
            except ValueError:
                row = None
            if isinstance(row, dict):
                found.append((number, row))
            elif line.strip():
                raise BadTrace(f"{path}, line {number}: no JSON object. A trace has one on each line; cut this one.")
    return found


def _bad(path: str, number: int, needs: str) -> BadTrace:
    return BadTrace(f"{path}, line {number}: {needs}. Correct or cut the line.")


def _mooncake(
    path: str, lines: Iterable[tuple[int, dict[str, Any]]], names: _Names, *, is_timed: bool
) -> Iterator[_Row]:
    """Mooncake's: an arrival in milliseconds, and names of blocks that hold for the whole trace."""
    step = _names_in_block(row for _, row in lines)
    for number, row in lines:
        try:
            prompt, output = int(row["input_length"]), int(row["output_length"])
            ids, arrival = [int(name) for name in row["hash_ids"]], float(row["timestamp"]) / 1000 if is_timed else 0.0
        except (KeyError, TypeError, ValueError):
            needs = "needs numbers timestamp, input_length, output_length and a list hash_ids"
            raise _bad(path, number, needs) from None
        if prompt < 1 or arrival < 0:
            raise _bad(path, number, "input_length has to be at least 1 and timestamp at least 0")
        full = min(prompt // BLOCK, len(ids) // step)
        end = tuple(ids[full * step :]) or None
        head = BLOCK if full and ids[0] == 0 else 0  # the block with which nearly all of them begin
        blocks = [tuple(ids[at * step : (at + 1) * step]) for at in range(full)]
        yield _Row(None, arrival, 0.0, prompt, max(1, output), _chained(names, blocks), head, end)


def _names_in_block(rows: Iterable[dict[str, Any]]) -> int:
    """No file says how long its blocks are, and the last one of a prompt may be shorter: it is a power of two."""
    longest = 1
    for row in rows:
        with suppress(KeyError, TypeError, ZeroDivisionError):
            longest = max(longest, math.ceil(row["input_length"] / len(row["hash_ids"])))
    return max(1, BLOCK >> (longest - 1).bit_length())


def _claude_code(path: str, lines: Iterable[tuple[int, dict[str, Any]]], names: _Names) -> Iterator[_Row]:
    """One session a line, subagents inside; blocks of 64 tokens with names of the session's own.

    Sessions with equally long tools and system prompts are taken to share these.
    """
    streams = 0
    step = BLOCK // 64
    for number, row in lines:
        try:
            groups = [(row["requests"], row["tool_tokens"], row["system_tokens"])]
            groups += [
                (inner["requests"], inner.get("tool_tokens", 0), inner.get("system_tokens", 0))
                for inner in row["requests"]
                if inner.get("type") == "subagent" and "requests" in inner
            ]
            for requests, tools, system in groups:
                streams += 1
                head = int(tools) + int(system)
                shared: list[Hashable] = [("tools", tools) for _ in range(int(tools) // BLOCK)]
                shared += [("system", tools, system) for _ in range(head // BLOCK - len(shared))]
                for request in requests:
                    if "hash_ids" not in request:
                        continue
                    ids, prompt = request["hash_ids"], int(request["in"])
                    full = min(prompt // BLOCK, len(ids) // step)
                    own = [(streams, *ids[at * step : (at + 1) * step]) for at in range(len(shared), full)]
                    pause, output = float(request.get("think_time") or 0), max(1, int(request["out"]))
                    blocks = _chained(names, [*shared[:full], *own])
                    yield _Row(streams, 0.0, pause, max(1, prompt), output, blocks, head, ids[-1] if ids else None)
        except (KeyError, TypeError, ValueError, AttributeError):
            needs = "needs tool_tokens, system_tokens and a list requests, each with in, out and hash_ids"
            raise _bad(path, number, needs) from None


def _chained(names: _Names, contents: Sequence[Hashable]) -> tuple[int, ...]:
    chain, parent = [], 0
    for content in contents:
        parent = names.of("block", parent, content)
        chain.append(parent)
    return tuple(chain)


def _with_boundaries(name: str, rows: Iterable[_Row], names: _Names, *, is_timed: bool) -> Trace:
    """What a gateway finds in these prompts, in the order of the trace.

    Boundaries are the end of the system prompt; where an earlier prompt with its answer ends, if this one goes on from
    there (history); where two earlier prompts have parted (learned); and its own end (turn).
    """
    sessions: dict[int, list[TraceRequest]] = {}
    by_end: dict[int, TraceRequest] = {}  # by last full block
    nexts: dict[int, int] = {}  # what followed a block first
    parted: set[int] = set()
    kept: set[int] = set()  # places that a request before had as boundaries
    for row in rows:
        before = _continued(row, by_end)
        stream = row.stream if row.stream is not None else before.session if before else len(sessions) + 1
        last = row.blocks[-1] if row.blocks else 0
        own = {names.place(row.prompt, "turn", last, row.prompt, row.end, 0 if row.blocks else stream)}
        if 16 <= row.head < row.prompt and len(row.blocks) >= row.head // BLOCK:
            whole = row.blocks[row.head // BLOCK - 1] if row.head >= BLOCK else 0
            own.add(names.place(row.head, "system", whole, row.head))
        for at, block in enumerate(row.blocks, 1):
            if block in parted and (before is None or at * BLOCK > before.prompt):
                own.add(names.place(at * BLOCK, "learned", block))
        if before is not None and (at := before.prompt + before.output) < row.prompt:
            inside = row.blocks[min(at // BLOCK, len(row.blocks)) - 1] if row.blocks else 0
            own.add(names.place(at, "history", inside, at))
        for block, following in pairwise(row.blocks):
            if nexts.setdefault(block, following) != following:
                parted.add(block)
        path = sorted(own.union(before.path if before else ()))
        if len(path) > MAX_PATH:
            path = path[:8] + path[8 - MAX_PATH :]
        shareable = min(row.prompt - 1, max((place.tokens for place in path if place.name in kept), default=0))
        kept |= {place.name for place in own}
        session = sessions.setdefault(stream, [])
        about = (row.arrival, row.pause, row.prompt, row.output, row.blocks)
        request = TraceRequest(stream, len(session), *about, tuple(sorted(own)), tuple(path), shareable)
        session.append(request)
        if len(row.blocks) > 1:
            by_end[last] = request
    return Trace(name, tuple(tuple(session) for session in sessions.values()), is_timed)


def _continued(row: _Row, by_end: dict[int, TraceRequest]) -> TraceRequest | None:
    """The longest earlier request that this one is taken to go on from."""
    for block in reversed(row.blocks[1:]):
        before = by_end.get(block)
        if before is not None and before.prompt <= row.prompt:
            return before
    return None


def synthetic(sessions: int, seed: int) -> Trace:
    """Conversations with the lengths, pauses and turns of Mooncake's conversation trace; deterministic by `seed`.

    Drawn from log-normal and geometric distributions fitted to its first 4,000 requests: 1.4 turns on the average, a
    first prompt of 6,861 tokens in the median and 12,500 on the average, every fourth later turn with an attachment.
    """
    drawn = random.Random(seed)  # a simulation
    names = _Names()
    pending: list[tuple[float, _Row]] = []
    for session in range(1, sessions + 1):
        arrival, prompt = drawn.random() * sessions / 2.2, min(120_000, round(drawn.lognormvariate(8.83, 1.1)) + BLOCK)
        ids: list[Hashable] = ["system"]
        while True:
            output = max(1, round(drawn.gauss(347, 180)))
            ids += [(session, at) for at in range(len(ids), prompt // BLOCK)]
            row = _Row(session, arrival, 0.0, prompt, output, _chained(names, ids), BLOCK, (session, prompt))
            pending.append((arrival, row))
            if drawn.random() < 0.71:
                break
            arrival += drawn.lognormvariate(4.76, 0.9)
            is_long = drawn.random() < 0.25
            prompt += output + round(drawn.lognormvariate(8.4, 0.9) if is_long else drawn.lognormvariate(3.2, 1.0)) + 1
    rows = [row for _, row in sorted(pending, key=lambda item: item[0])]
    return _with_boundaries("synthetic conversations", rows, names, is_timed=True)


# NVIDIA Dynamo's agentic trace, drawn anew. Its recipes (Nemotron 3.5 Lightning and others) replay
# `64k_400_90kv_agent_new_noschedule_short_15perc.jsonl`. What is published of that file is kept
# (`recipes/*/perf/README.md` of ai-dynamo/dynamo, vLLM's article on decode context parallelism): 3,411 requests within
# a context of 262,144 tokens, half of them of 64k and more, 18 % below 8k, 4 % above 128k; 400 tokens out in the
# median, one output in ten longer than 6.9k; four shared heads, of 57,600 tokens each, 90 % of 64,000; 68 to 77 % of
# all tokens found by a whole engine. How long sessions are is not published: it is fitted to these hits. There are no
# times.

REQUESTS = 3411

CONTEXT = 262_144  # tokens; longer prompts are errors in the published runs

HEAD = 57_600  # tokens that all agents of one kind begin with

HEADS = (4, 3, 2, 1)  # how often each kind is met

LEAST = 2 * BLOCK  # tokens of one's own, by which sessions are told apart


# Log-normal distributions of tokens: median and sigma.
OWN = 11_000, 0.95  # of an agent's first prompt, behind its head
LONG_OWN, LONG = (150_000, 0.5), 0.06  # of few agents, that have read much
SMALL = 5_000, 1.2  # a first prompt without a head
TOOL = 900, 1.1  # that a tool's result adds
OUTPUT = 399, 2.2


def _tokens(drawn: random.Random, median: float, sigma: float) -> int:
    return max(1, round(drawn.lognormvariate(math.log(median), sigma)))


def records(count: int, seed: int) -> Iterator[dict[str, Any]]:
    """As many requests in Mooncake's format, without timestamps, in the order in which they are sent."""
    drawn = random.Random(seed)  # a simulation
    turns: list[tuple[float, int, int, list[Hashable]]] = []
    session = 0
    while len(turns) < count:
        session += 1
        turns += _session(session, drawn)
    names: dict[Hashable, int] = {}
    for _, prompt, output, blocks in sorted(turns[:count], key=lambda turn: turn[0]):
        ids = [names.setdefault(block, len(names) + 1) for block in blocks]
        yield {"input_length": prompt, "output_length": output, "hash_ids": ids}


def _session(session: int, drawn: random.Random) -> Iterator[tuple[float, int, int, list[Hashable]]]:
    """Its turns: when each is sent, the prompt's and the output's tokens, and what its blocks hold."""
    head, kind = 0, 0
    if drawn.random() < 0.67:  # the others are subagents and short questions, which share nothing
        head, (kind,) = HEAD, drawn.choices(range(len(HEADS)), HEADS)
        own = _tokens(drawn, *(LONG_OWN if drawn.random() < LONG else OWN)) + LEAST
    else:
        own = min(_tokens(drawn, *SMALL), HEAD)
    shared, sent = head // BLOCK, drawn.random()
    while head + own <= CONTEXT:
        output = min(32_768, _tokens(drawn, *OUTPUT))
        blocks: list[Hashable] = [("head", kind, at) for at in range(shared)]
        # The last block is not full, and another one as soon as the session goes on.
        full = (head + own) // BLOCK
        blocks += [(session, at) for at in range(shared, full)]
        if (head + own) % BLOCK:
            blocks.append((session, full, own))
        yield sent, head + own, output, blocks
        if drawn.random() >= 0.4:  # sessions are cut out of a longer trace: few of their turns are left
            return
        own += output + _tokens(drawn, *TOOL)
        sent += drawn.random() / 20
