"""The stories as a table for people."""

from __future__ import annotations

from collections.abc import Sequence

from proxy.bench.stories import Line, Planted, Story

COLUMNS = ("engine", "hit at 2", "hit after", "passes", "first token (ms)", "tok/s", "exact", "against vLLM alone")
WIDTHS = (14, 8, 22, 11, 16, 6, 17, 0)


def render(stories: Sequence[Story], defects: Sequence[Planted]) -> str:
    """All stories, a block each, and the proof that `exact` means something."""
    lines = []
    for story in stories:
        verdict = "held" if story.held else "NOT HELD"
        lines += ["", f"{story.title}: {story.shared} tokens shared, oracle hit {story.oracle}"]
        lines += ["  " + _row(COLUMNS)]
        alone = next(line for line in story.lines if line.engine == "vLLM alone")
        lines += ["  " + _row(_cells(line, alone)) for line in story.lines]
        lines += [f"  {verdict}: {story.expectation}"]
    lines += ["", "would the exactness check notice? (each defect planted in an engine of its own kind of hit)"]
    for defect in defects:
        found = "differs" if defect.caught else "exact"
        where = "" if defect.first_difference is None else f", first at token {defect.first_difference}"
        lines.append(f"  {defect.defect:<24} {found}: logprob error {defect.largest_error:.1e}{where}")
    return "\n".join(lines)


def legend() -> str:
    """What the columns mean."""
    return "\n".join(
        (
            "passes: forward passes that computed prompt tokens, first request / later ones (median); of a",
            "fan-out: all passes of the first wave / the next one, and under 'hit after' the followers of the first.",
            "first token: the same, milliseconds, median. exact: 32 greedy tokens and their top-5 logprobs equal the",
            "reference engine's (no prefix caching) within 1e-4; largest error",
            "in brackets. Seamark is reached through its gateway, the others directly. A CPU and a toy model: a",
            "pass costs little here, with a real model on a GPU as much as hundreds of prompt tokens.",
        )
    )


def _row(cells: Sequence[str]) -> str:
    return " ".join(cell.ljust(width) for cell, width in zip(cells, WIDTHS, strict=True)).rstrip()


def _cells(line: Line, alone: Line) -> tuple[str, ...]:
    return (
        line.engine,
        _number(line.hit_second),
        " ".join(map(str, line.hit_first_wave or line.hit_after)),
        " / ".join(_number(value) for value in (line.passes_cold, line.passes_warm) if value is not None),
        " / ".join(f"{value * 1000:.0f}" for value in (line.ttft_cold, line.ttft_warm) if value is not None),
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
    for name, ours, theirs in (
        ("cold", line.ttft_cold, alone.ttft_cold),
        ("warm", line.ttft_warm, alone.ttft_warm),
    ):
        if ours and theirs:
            parts.append(
                f"{name} {theirs / ours:.1f}x faster" if ours <= theirs else f"{name} {ours / theirs:.1f}x SLOWER"
            )
    for name, mine, other in (
        ("cold", line.passes_cold, alone.passes_cold),
        ("warm", line.passes_warm, alone.passes_warm),
    ):
        if mine is not None and other is not None and mine > other:
            parts.append(f"{mine - other:+.0f} passes {name}")
    return ", ".join(parts)
