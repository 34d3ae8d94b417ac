"""The stories: what clients do with one long prefix, each played on every engine in the same run."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from proxy.bench.harness import exact, planted
from proxy.bench.harness.client import MIN_TOKENS, Messages, TimedAnswer, ask, ask_all, complete, tokens_of
from proxy.bench.harness.counters import PassCounter
from proxy.bench.harness.prompts import Shared, prose, with_shared_tokens
from proxy.boundaries.divergence import common_prefix

UNIT = 16  # tokens; the oracle's match unit

SYSTEM_PROMPT = "one system prompt, six questions"

SIZES = (130, 163, 469, 1864, 6000)

LONG = 1000  # shared tokens from which a cold start takes long enough to be steady

FAN_OUT = 4

TURNS = 4

SHORT = 2  # tokens of an answer that is only timed

JUDGED = (0, 1)  # requests of a series whose answers are compared: a cold one and a warm one


def cold_starts(shared: int) -> int:
    """How many system prompts of a size are sent; each is a cold start, and the median counts."""
    return 27 if shared < LONG else 3


SECTIONS = (
    "Write the opening section: what this brief is about.",
    "Section two: list the facts, without comment.",
    "Now the third section, on risks and open questions.",
    "Close with a recommendation in one paragraph.",
)


@dataclass
class Contender:
    """An engine in the stories: where clients reach it, and where its passes are counted."""

    name: str
    url: str
    passes: PassCounter
    metrics: str = ""  # where the engine's own numbers are, if they include Seamark's


@dataclass
class Line:
    """One engine's result in one story. Times in seconds, lengths in tokens; medians over several requests.

    First tokens are listed by request, in the same order for every engine.
    """

    engine: str
    hit_second: int | None = None
    hit_after: list[int] = field(default_factory=list)
    hit_first_wave: list[int] = field(default_factory=list)
    passes_cold: float | None = None
    passes_warm: float | None = None
    ttfts_cold: list[float] = field(default_factory=list)
    ttfts_warm: list[float] = field(default_factory=list)
    tokens_per_second: float | None = None
    all_in_flight: bool | None = None
    largest_error: float = 0.0
    first_difference: int | None = None

    @property
    def ttft_cold(self) -> float | None:
        """The median of first requests."""
        return statistics.median(self.ttfts_cold) if self.ttfts_cold else None

    @property
    def ttft_warm(self) -> float | None:
        """The median of later requests."""
        return statistics.median(self.ttfts_warm) if self.ttfts_warm else None

    @property
    def exact(self) -> bool:
        """As `exact.Difference.exact`, over all answers of the line."""
        return exact.Difference(self.first_difference, self.largest_error).exact


@dataclass
class Story:
    """One table block."""

    title: str
    shared: int
    oracle: int
    lines: list[Line]
    held: bool
    expectation: str


@dataclass
class StoryStage:
    """What all stories need."""

    client: httpx.AsyncClient
    reference: str  # URL of the reference engine
    contenders: Sequence[Contender]  # Seamark first
    seed: int = 0

    def fresh_seed(self) -> int:
        """A seed no story has used: its prompt is cold everywhere."""
        self.seed += 1
        return self.seed

    async def shared_prompts(self, shared: int, questions: Sequence[str] | None = None) -> Shared:
        """Prompts nobody has seen that share exactly `shared` tokens."""
        extra = {} if questions is None else {"questions": questions}
        return await with_shared_tokens(self.client, self.reference, shared, self.fresh_seed(), **extra)

    async def right_answers(self, prompts: Sequence[Messages]) -> list[TimedAnswer]:
        """The reference engine's answers."""
        return await ask_all(self.client, self.reference, prompts, MIN_TOKENS, parallel=8)


def floored(tokens: int, unit: int = UNIT) -> int:
    """The oracle's hit for `tokens` shared tokens."""
    return tokens // unit * unit


def judge(line: Line, answers: Sequence[TimedAnswer], right: Sequence[TimedAnswer]) -> None:
    """Write into `line` how far `answers` are from the `right` ones."""
    worst = exact.worst([exact.compare(answer, wanted) for answer, wanted in zip(answers, right, strict=True)])
    line.first_difference, line.largest_error = worst.position, worst.largest_error


@dataclass
class _Series:
    """What one engine answers in a story whose requests come one after the other."""

    contender: Contender
    cold: list[TimedAnswer] = field(default_factory=list)
    warm: list[TimedAnswer] = field(default_factory=list)
    passes_cold: list[int] = field(default_factory=list)
    passes_warm: list[int] = field(default_factory=list)

    async def send(self, client: httpx.AsyncClient, prompt: Messages, tokens: int, *, is_cold: bool) -> None:
        """One request, and its passes."""
        self.contender.passes.restart()
        answer = await ask(client, self.contender.url, prompt, tokens)
        passes = self.contender.passes.after([answer]).with_prompt
        (self.cold if is_cold else self.warm).append(answer)
        (self.passes_cold if is_cold else self.passes_warm).append(passes)

    def line(self) -> Line:
        """Its medians."""
        return Line(
            self.contender.name,
            passes_cold=statistics.median(self.passes_cold),
            passes_warm=statistics.median(self.passes_warm),
            ttfts_cold=[answer.ttft for answer in self.cold],
            ttfts_warm=[answer.ttft for answer in self.warm],
        )


def _turned(played: Sequence[_Series], number: int) -> Sequence[_Series]:
    """Another engine begins each time: the machine is not the same for the first and the last."""
    turn = number % len(played)
    return [*played[turn:], *played[:turn]]


async def one_system_prompt(stage: StoryStage, shared: int) -> Story:
    """Six questions, one after the other, on one system prompt; a question or two on others for the medians."""
    variants = [await stage.shared_prompts(shared) for _ in range(cold_starts(shared))]
    full = variants[0]
    right = await stage.right_answers([full.prompts[index] for index in JUDGED])
    played = [_Series(contender) for contender in stage.contenders]
    for number, variant in enumerate(variants):
        prompts = variant.prompts if variant is full else variant.prompts[:2]
        for series in _turned(played, number):
            for index, prompt in enumerate(prompts):
                tokens = MIN_TOKENS if variant is full and index in JUDGED else SHORT
                await series.send(stage.client, prompt, tokens, is_cold=index == 0)
    lines = []
    for series in played:
        answers = [series.cold[0], *series.warm[: len(full.prompts) - 1]]
        line = series.line()
        hits = [answer.cached_tokens or 0 for answer in answers[1:]]
        line.hit_second, line.hit_after = hits[0], hits[1:]
        judge(line, [answers[index] for index in JUDGED], right)
        lines.append(line)
    oracle = floored(shared)
    ours = lines[0]
    return Story(
        SYSTEM_PROMPT,
        shared,
        oracle,
        lines,
        held=ours.exact and {ours.hit_second, *ours.hit_after} == {oracle},
        expectation=f"every request after the first hits {oracle}",
    )


NEXT_WAVE = (  # first words that share no beginning with those of the sections
    "Title of six words, please.",
    "Keywords for an index: three.",
    "Readers: who are they, and why?",
    "Anything missing? One sentence.",
)


async def fan_out(stage: StoryStage, size: int, parallel: int) -> Story:
    """A brief-writer sends four sections on one new system prompt, `parallel` at a time, and four more after that.

    Whether the later ones wait for the first is the engine's choice, by what waiting saves; the next wave hits anyway.
    """
    shared = await stage.shared_prompts(size, (*SECTIONS, *NEXT_WAVE))
    wave, after = shared.prompts[: len(SECTIONS)], shared.prompts[len(SECTIONS) :]
    right = await stage.right_answers(shared.prompts)
    lines, choice = [], ""
    for contender in stage.contenders:
        contender.passes.restart()
        before = await followers(stage.client, contender)
        answers = await ask_all(stage.client, contender.url, wave, MIN_TOKENS, parallel)
        passes = contender.passes.after(answers)
        if contender is stage.contenders[0]:
            choice = await chosen(stage.client, contender, before, shared.shared)
        line = Line(contender.name, passes_cold=passes.all)
        line.ttfts_cold = [answer.ttft for answer in answers]
        began, ended = min(answer.sent for answer in answers), max(answer.finished for answer in answers)
        line.tokens_per_second = sum(len(answer.steps) for answer in answers) / (ended - began)
        line.all_in_flight = max(answer.sent for answer in answers) < min(answer.first_token for answer in answers)
        # The leader is whoever found nothing; with several at once that need not be the first sent.
        line.hit_first_wave = sorted(answer.cached_tokens or 0 for answer in answers)[1:]
        contender.passes.restart()
        next_answers = await ask_all(stage.client, contender.url, after, MIN_TOKENS, FAN_OUT)
        line.passes_warm = contender.passes.after(next_answers).all
        line.ttfts_warm = [answer.ttft for answer in next_answers]
        hits = [answer.cached_tokens or 0 for answer in next_answers]
        line.hit_second, line.hit_after = hits[0], hits[1:]
        judge(line, [*answers, *next_answers], right)
        lines.append(line)
    oracle = floored(shared.shared)
    ours = lines[0]
    in_flight = bool(ours.all_in_flight) or parallel < FAN_OUT
    waited = set(ours.hit_first_wave) == {oracle}
    return Story(
        f"cold fan-out: four sections, {parallel} in parallel, and the next wave",
        shared.shared,
        oracle,
        lines,
        held=ours.exact
        and in_flight
        and {ours.hit_second, *ours.hit_after} == {oracle}
        and (waited or (parallel == FAN_OUT and set(ours.hit_first_wave) <= {0, oracle})),
        expectation=f"the next wave hits {oracle}; in the first, {choice}"
        + (", all four in flight before the first token" if parallel == FAN_OUT else ""),
    )


async def followers(client: httpx.AsyncClient, contender: Contender) -> Mapping[str, float]:
    """The engine's own counts around fan-outs and its learnt step times, by metric; empty for one without Seamark."""
    if not contender.metrics:
        return {}
    text = (await client.get(contender.metrics)).text
    wanted = ("seamark_followers_total{", "seamark_pass_seconds", "seamark_token_seconds")
    return {
        line.rsplit(" ", 1)[0]: float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if line.startswith(wanted)
    }


async def chosen(client: httpx.AsyncClient, contender: Contender, before: Mapping[str, float], shared: int) -> str:
    """What the engine chose for the followers of a wave, and on which figures."""
    after = await followers(client, contender)
    held = after.get('seamark_followers_total{fate="held"}', 0) - before.get('seamark_followers_total{fate="held"}', 0)
    token, one_pass = after.get("seamark_token_seconds", 0.0), after.get("seamark_pass_seconds", 0.0)
    figures = f"{shared} tokens take {shared * token * 1000:.0f} ms, a pass {one_pass * 1000:.0f} ms"
    if not token:
        figures = "no step times learnt yet"
    return f"{held:.0f} waited for the leader ({figures})"


def _turns(seed: int) -> list[Messages]:
    """The requests of a conversation, whose assistant's side is given."""
    messages: list[Mapping[str, Any]] = [{"role": "system", "content": prose(90, seed)}]
    turns: list[Messages] = []
    for turn in range(TURNS):
        question = f"{turn + 1}. {prose(30, seed + 1000 * (turn + 1))} What follows?"
        messages.append({"role": "user", "content": question})
        turns.append(list(messages))
        messages.append({"role": "assistant", "content": prose(40, seed + 10_000 * (turn + 1))})
    return turns


async def conversation(stage: StoryStage) -> Story:
    """Four turns, the same on every engine; some more conversations for the medians."""
    chats = [_turns(stage.fresh_seed()) for _ in range(cold_starts(0))]
    turns = chats[0]
    prompts = [await tokens_of(stage.client, stage.reference, turn) for turn in turns]
    shared = [common_prefix(prompts[turn - 1], prompts[turn]) for turn in range(1, TURNS)]
    right = await stage.right_answers(turns)
    played = [_Series(contender) for contender in stage.contenders]
    for number, chat in enumerate(chats):
        for series in _turned(played, number):
            for index, messages_so_far in enumerate(chat):
                tokens = MIN_TOKENS if chat is turns else SHORT
                await series.send(stage.client, messages_so_far, tokens, is_cold=index == 0)
    lines = []
    for series in played:
        answers = [series.cold[0], *series.warm[: TURNS - 1]]
        line = series.line()
        hits = [answer.cached_tokens or 0 for answer in answers[1:]]
        line.hit_second, line.hit_after = hits[0], hits[1:]
        judge(line, answers, right)
        lines.append(line)
    oracles = [floored(tokens) for tokens in shared]
    ours = [lines[0].hit_second or 0, *lines[0].hit_after]
    return Story(
        f"a conversation of four turns (shared {', '.join(map(str, shared))})",
        shared[0],
        oracles[0],
        lines,
        # A turn ends before the generation prompt, which some templates repeat in history and some do not.
        held=lines[0].exact and all(hit >= oracle - UNIT for hit, oracle in zip(ours, oracles, strict=True)),
        expectation=f"each turn hits the one before, {', '.join(map(str, oracles))} at best, up to {UNIT} tokens less",
    )


async def same_request_twice(stage: StoryStage) -> Story:
    """The identical request again: everything but the last token could be shared."""
    variants = [(await stage.shared_prompts(163)).prompts[0] for _ in range(cold_starts(163))]
    tokens = len(await tokens_of(stage.client, stage.reference, variants[0]))
    right = await stage.right_answers(variants[:1])
    played = [_Series(contender) for contender in stage.contenders]
    for number, prompt in enumerate(variants):
        for series in _turned(played, number):
            for is_cold in (True, False):
                await series.send(stage.client, prompt, MIN_TOKENS if prompt is variants[0] else SHORT, is_cold=is_cold)
    lines = []
    for series in played:
        line = series.line()
        line.hit_second = series.warm[0].cached_tokens
        judge(line, [series.cold[0], series.warm[0]], right + right)
        lines.append(line)
    oracle = floored(tokens - 1)
    return Story(
        "the same request twice",
        tokens,
        oracle,
        lines,
        # What is left over after the turn's end is shorter than a generation prompt and a unit.
        held=lines[0].exact and (lines[0].hit_second or 0) >= oracle - UNIT,
        expectation=f"the second hits {oracle}, at most {UNIT} tokens less",
    )


@dataclass
class Planted:
    """Whether the exactness check noticed a defect."""

    defect: str
    caught: bool
    largest_error: float
    first_difference: int | None


async def planted_defects(stage: StoryStage, url: str, folder: Path, unit: int = UNIT) -> list[Planted]:
    """Plant each defect in the engine at `url`, and compare its answer; the first line is without a defect."""
    found = []
    for defect in (None, *planted.DEFECTS):
        prompts = (await stage.shared_prompts(163)).prompts
        prompt = await tokens_of(stage.client, stage.reference, prompts[0])
        hit = floored(len(prompt) - 1, unit)
        right = await complete(stage.client, stage.reference, prompt)
        # Leaves a state one unit before the hit, and one there. vLLM alone does so without the hints.
        await complete(stage.client, url, prompt[: hit - unit + 1], vllm_xargs={"seamark_boundaries": [hit - unit]})
        await complete(stage.client, url, prompt, vllm_xargs={"seamark_boundaries": [hit]})
        if defect is None:
            answer = await complete(stage.client, url, prompt)
        else:
            with planted.planted(folder, defect):
                answer = await complete(stage.client, url, prompt)
        if answer.cached_tokens != hit:
            raise RuntimeError(f"planting {defect}: the engine hit {answer.cached_tokens} tokens, not {hit}")
        difference = exact.compare(answer, right)
        caught = not difference.exact
        found.append(Planted(defect or "none", caught, difference.largest_error, difference.position))
    return found
