"""`python -m tests.bench.volatile_heads`: is a prefix that changes by itself named, and is an honest hit left alone?

On a real engine: conversations whose system prompt holds a date, a time, an id or the like, first, in the middle or
last. On the next day it has changed; the gateway has to say so, of what kind it is and what it costs, and that day's
later turns are hits. Then 200 requests on fixed prompts, their questions full of dates and ids: all of them are hits.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import httpx

from proxy.bench.harness.client import open_client
from proxy.bench.harness.prompts import QUESTIONS, prose
from proxy.bench.harness.servers import MATCH_UNITS, MODEL_NAME, NEMOTRON_H, Server, Servers, generated_model, narrator
from proxy.boundaries.token_ids import common_prefix
from proxy.chat.chat import CHAT
from proxy.observability.reasons import NEAR_UNITS
from tests.bench.agent_turns import tools

MATCH_UNIT = MATCH_UNITS[NEMOTRON_H]

HONEST, PROMPTS = 200, 10

FLAGS = ("--enable-auto-tool-choice", "--tool-call-parser", "hermes")

WORDS_OF_HEAD = 300

EXPLAINED_SECONDS = 5.0

FIRST, MIDDLE, LAST = "first", "middle", "last"

TOOL_ORDER = "tool order"

CHANGED, HIT = "prefix_changed", "hit"

WORDS = (
    "next day: the first request of a conversation whose prompt differs from an earlier one's in that text alone. It\n"
    "must name the kind of text and the tokens to save, unless the text stands last; it says hit if it shares tokens\n"
    "and got them all, otherwise prefix_changed. later: the next turn of that conversation and another conversation\n"
    "of that day; both must say hit if they got everything, but for less than two match units. oracle: tokens shared\n"
    "with an earlier request, in whole match units."
)


class Text(NamedTuple):
    """A text that changes by itself."""

    kind: str  # what the gateway's name for it contains
    today: str
    tomorrow: str


YEAR = time.gmtime().tm_year  # a date of another one does not change by itself

TEXTS = {
    "ISO date": Text("date", f"Today is {YEAR}-11-21.", f"Today is {YEAR}-11-22."),
    "date in words": Text("date", f"Today's date: Sat Nov 21 {YEAR}", f"Today's date: Sun Nov 22 {YEAR}"),
    "long date": Text("date", f"It is Saturday, November 21, {YEAR}.", f"It is Sunday, November 22, {YEAR}."),
    "date with slashes": Text("date", f"Date: 11/21/{YEAR}.", f"Date: 11/22/{YEAR}."),
    "date with points": Text("date", f"Heute ist der 21.11.{YEAR}.", f"Heute ist der 22.11.{YEAR}."),
    "time": Text("time", "It is 10:41:07 now.", "It is 17:05:52 now."),
    "time stamp": Text("date", f"Now: {YEAR}-11-21T10:41:07Z", f"Now: {YEAR}-11-22T17:05:52Z"),
    "uuid": Text(
        "uuid",
        "Session 5f0c7c1e-93d4-4c7c-9b1e-0a54f4f0a7d1.",
        "Session 0b9e3e52-7d0f-4a66-8a4c-c1a1f3f7be93.",
    ),
    "number": Text("number", "Request number 48213.", "Request number 97755."),
    "path": Text("", "Working directory: /home/ada/tides", "Working directory: /home/bert/locks"),
    "git status": Text(
        "git",
        "Git status: branch main\n M src/tides.py\nRecent commits:\n1f3c9d2 Round up",
        "Git status: branch locks\n M src/locks.py\nRecent commits:\n77ab01e Open both gates",
    ),
    TOOL_ORDER: Text("tool", "", ""),
}

DATES = tuple(name for name, text in TEXTS.items() if text.kind == "date")


class Case(NamedTuple):
    """A text and where it stands in the system prompt."""

    name: str
    place: str

    @property
    def text(self) -> Text:
        """What changes."""
        return TEXTS[self.name]

    def system(self, text: str) -> str:
        """The system prompt with this text."""
        seed = 100 * list(TEXTS).index(self.name) + (FIRST, MIDDLE, LAST).index(self.place)
        rules = [prose(WORDS_OF_HEAD // 2, 10_000 + 2 * seed + half) for half in range(2)]
        rules.insert((FIRST, MIDDLE, LAST).index(self.place), text)
        return "\n".join(rules)


CASES = tuple(Case(name, place) for name in DATES for place in (FIRST, MIDDLE, LAST)) + tuple(
    Case(name, MIDDLE) for name in TEXTS if name not in DATES
)


class Asked(NamedTuple):
    """One request; tokens."""

    oracle: int
    delivered: int
    told: Mapping[str, Any]  # /seamark/requests/{id}

    @property
    def reason(self) -> str:
        """What the gateway says."""
        return str(self.told["reason"])

    @property
    def complete(self) -> bool:
        """Whether it got all it shares; states are not kept nearer to each other than `NEAR_UNITS`."""
        return self.delivered > self.oracle - NEAR_UNITS * MATCH_UNIT


class Named(NamedTuple):
    """What came of one case."""

    case: Case
    next_day: Asked
    later: tuple[Asked, ...]

    @property
    def complaints(self) -> list[str]:
        """What does not hold."""
        found = []
        saves = self.next_day.told.get("would_save", {})
        wanted = HIT if self.next_day.delivered and self.next_day.complete else CHANGED
        if self.next_day.reason != wanted:
            found.append(f"says {self.next_day.reason}, not {wanted}")
        named = any(self.case.text.kind in kind and tokens > 0 for kind, tokens in saves.items())
        if not named and self.case.place != LAST:
            found.append(f"would save {saves}")
        # What they share most with is the day's own first request, which has not changed.
        wrong = [each for each in self.later if each.reason == CHANGED or (each.complete and each.reason != HIT)]
        return found + [f"later says {each.reason}" for each in wrong]


class Asking:
    """A gateway, and what it has been asked."""

    def __init__(self, http: httpx.AsyncClient, gateway: Server, engine: Server) -> None:
        self._http = http
        self._gateway = gateway
        self._engine = engine
        self._before: list[list[int]] = []

    async def ask(self, messages: Sequence[Mapping[str, Any]], offered: Sequence[Any] = ()) -> Asked:
        """One request. Raises `RuntimeError` for an error answer, or if the gateway does not explain it."""
        body = {"model": MODEL_NAME, "messages": messages, "max_tokens": 1, "temperature": 0}
        body |= {"tools": offered} if offered else {}
        answer = await self._http.post(self._gateway.url + CHAT, json=body)
        if answer.status_code != 200:
            raise RuntimeError(f"{answer.status_code} {answer.text[:300]}")
        told = await self._explanation(answer.headers["x-request-id"])
        ids = (await self._http.post(f"{self._engine.url}{CHAT}/render", json=body)).json()["token_ids"]
        shared = max((common_prefix(ids, other) for other in self._before), default=0)
        self._before.append(ids)
        oracle = min(shared, len(ids) - 1) // MATCH_UNIT * MATCH_UNIT
        return Asked(oracle, told.get("delivered") or 0, told)

    async def _explanation(self, request_id: str) -> Mapping[str, Any]:
        deadline = time.monotonic() + EXPLAINED_SECONDS
        while time.monotonic() < deadline:
            answer = await self._http.get(f"{self._gateway.url}/seamark/requests/{request_id}")
            if answer.status_code == 200 and (told := answer.json()).get("reason") is not None:
                return dict(told)
            await asyncio.sleep(0.02)
        raise RuntimeError(f"the gateway does not explain request {request_id}")

    async def name(self, case: Case) -> Named:
        """Two conversations of a day, then two of the next."""
        today, tomorrow = ({"role": "system", "content": case.system(text)} for text in case.text[1:])
        if case.name == TOOL_ORDER:
            return await self._order(case, today)
        questions = [{"role": "user", "content": question} for question in QUESTIONS]
        said = {"role": "assistant", "content": prose(30, len(case.name))}
        await self.ask([today, questions[0]])
        await self.ask([today, questions[0], said, questions[1]])
        await self.ask([today, questions[2]])
        next_day = await self.ask([tomorrow, questions[3]])
        turn = await self.ask([tomorrow, questions[3], said, questions[4]])
        other = await self.ask([tomorrow, questions[5]])
        return Named(case, next_day, (turn, other))

    async def _order(self, case: Case, system: Mapping[str, Any]) -> Named:
        """The same, of the order of tools."""
        one, other = tools(), tools()[::-1]
        chats = [[system, {"role": "user", "content": question}] for question in QUESTIONS]
        for chat in chats[:2]:
            await self.ask(chat, one)
        next_day, *later = [await self.ask(chat, other) for chat in chats[2:4]]
        return Named(case, next_day, tuple(later))

    async def honest(self, requests: int) -> list[Asked]:
        """Questions on fixed prompts; only those whose prompt was sent before are in the result."""
        draw, found = random.Random(7), []
        texts = list(TEXTS.values())
        for number in range(requests + PROMPTS):
            prompt = number % PROMPTS
            fixed = f"{prose(150, 500 + prompt)} {texts[prompt % len(texts)].today} {prose(60, 900 + prompt)}"
            day = f"2026-{draw.randint(1, 12):02}-{draw.randint(1, 28):02}"
            # The id stands first: questions share nothing.
            question = f"{draw.getrandbits(64):x} {day} {draw.choice(texts).tomorrow} {draw.choice(QUESTIONS)}"
            asked = await self.ask([{"role": "system", "content": fixed}, {"role": "user", "content": question}])
            found += [asked] if number >= PROMPTS else []
        return found


async def measure(cases: Sequence[Case], honest: int, say: Callable[[str], None]) -> tuple[list[Named], list[Asked]]:
    """Every case, then the honest hits, on one engine behind one gateway."""
    model = generated_model(say)
    with tempfile.TemporaryDirectory(prefix="seamark-heads-") as folder, Servers(Path(folder)) as servers:
        engine = servers.engine("seamark", model, flags=FLAGS)
        engine.wait_until_ready()
        gateway = servers.gateway(engine)
        gateway.wait_until_ready("/ready", seconds=60)
        async with open_client() as http:
            asking, named = Asking(http, gateway, engine), []
            for case in cases:
                say(f"{case.name}, {case.place}")
                named.append(await asking.name(case))
            say(f"{honest} honest requests")
            return named, await asking.honest(honest)


def dishonoured(honest: Sequence[Asked]) -> list[Asked]:
    """Those that do not say hit, or did not get all but what the beginnings of two questions may share."""
    return [asked for asked in honest if asked.reason != HIT or asked.delivered < asked.oracle - MATCH_UNIT]


def render(named: Sequence[Named], honest: Sequence[Asked]) -> str:
    """A line for each case, then the verdicts."""
    head = f"{'text':<20}{'place':<8}{'next day says':<17}{'got':>6}{'oracle':>8}"
    lines = [f"{head}  {'would save':<28}{'later':<40}changed"]
    for each in named:
        told, day = each.next_day.told, each.next_day
        saves = ", ".join(f"{kind} {tokens}" for kind, tokens in (told.get("would_save") or {}).items()) or "-"
        later = ", ".join(f"{asked.reason} {asked.delivered}/{asked.oracle}" for asked in each.later)
        changed = {name: value for name, value in (told.get("changed") or {}).items() if value is not None}
        cells = f"{day.reason:<17}{day.delivered:>6}{day.oracle:>8}  {saves:<28}{later:<40}"
        lines.append(f"{each.case.name:<20}{each.case.place:<8}{cells}{json.dumps(changed)}")
    wrong = [each for each in named if each.complaints]
    lines += [f"  {each.case.name}, {each.case.place}: {'; '.join(each.complaints)}" for each in wrong]
    lines.append(f"{'NOT HELD' if wrong else 'held'}: {len(named) - len(wrong)} of {len(named)} cases named")
    changed = dishonoured(honest)
    lines += [f"  {asked.reason}: {asked.delivered} of {asked.oracle}" for asked in changed[:10]]
    count = f"{len(honest) - len(changed)} of {len(honest)}"
    lines.append(f"{'NOT HELD' if changed else 'held'}: {count} honest hits say so")
    return "\n".join(lines)


def report(named: Sequence[Named], honest: Sequence[Asked]) -> dict[str, Any]:
    """Everything measured, for machines; tokens."""
    return {
        "cases": [
            {
                "text": each.case.name,
                "place": each.case.place,
                "next_day": each.next_day._asdict(),
                "later": [asked._asdict() for asked in each.later],
                "complaints": each.complaints,
            }
            for each in named
        ],
        "honest": len(honest),
        "dishonoured": [asked._asdict() for asked in dishonoured(honest)],
    }


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.bench.volatile_heads", description="are prefixes that change by themselves named?"
    )
    parser.add_argument("--honest", type=int, default=HONEST, metavar="N", help=f"requests on fixed prompts ({HONEST})")
    parser.add_argument("--text", action="append", choices=TEXTS, help="only this one (repeat); default: all")
    parser.add_argument("--json", action="store_true", help="print the report instead of the table")
    args = parser.parse_args(argv)
    if args.honest < 0:
        parser.error("--honest: at least 0")
    cases = [case for case in CASES if args.text is None or case.name in args.text]
    named, honest = asyncio.run(measure(cases, args.honest, narrator()))
    print(json.dumps(report(named, honest), indent=1) if args.json else f"{render(named, honest)}\n\n{WORDS}")
    return 1 if dishonoured(honest) or any(each.complaints for each in named) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
