"""The README's picture: what the second request with a system prompt finds, by its length and the cache's blocks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from proxy.bench.harness.client import ask, open_client
from proxy.bench.harness.prompts import QUESTIONS, with_shared_tokens
from proxy.bench.stories import Contender, floored

# Blocks in tokens, and whose they are, the last two with fp8 KV: from the smallest to the largest that people run.
BLOCKS = {544: "Qwen3-Next 80B", 1600: "Qwen3.8-27B", 8320: "Nemotron-3 Super"}
LENGTHS = range(200, 9_001, 200)  # shared tokens; a question adds some twenty

LEFT, TOP, WIDTH, HEIGHT, STEP = 64, 112, 240, 180, 288  # of the first panel, and to the next one
STROKES = ('stroke-width="3.5"', 'stroke-width="4"', 'stroke-width="2" stroke-dasharray="4 5"')  # Seamark first
LIGHT = "rect{fill:#fff}text{fill:#1d2730}.rule{stroke:#d5dade}.l0{stroke:#11808f}.l2{stroke:#4b2a8c}"
DARK = "rect{fill:#12181e}text{fill:#e8edf1}.rule{stroke:#303a43}.l0{stroke:#4fc4d3}.l2{stroke:#efe6ff}"
HEAD = f"""\
<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 920 348" width="920" height="348" role="img" fill="none"
 font-family="system-ui, -apple-system, Segoe UI, Helvetica, Arial, sans-serif" font-size="13">
<style>.l1{{stroke:#e07a50}}{LIGHT}@media(prefers-color-scheme:dark){{{DARK}}}</style>
<rect class="rule" x="1" y="1" width="918" height="346" rx="12"/>
"""

FoundShares = Mapping[str, Sequence[float]]  # by engine: at each length, of what could be found


async def measure(contenders: Sequence[Contender], reference: str) -> FoundShares:
    """What each engine finds of prompts that nobody has seen, and that it is asked twice about."""
    found: dict[str, list[float]] = {each.name: [] for each in contenders}
    async with open_client() as client:
        for shared in LENGTHS:
            prompts = await with_shared_tokens(client, reference, shared, shared, QUESTIONS[:2])
            for each in contenders:
                _, second = [await ask(client, each.url, prompt, 1) for prompt in prompts]
                found[each.name].append((second.cached_tokens or 0) / floored(shared))
    return found


def draw(panels: Mapping[int, FoundShares]) -> str:
    """A panel for each size of a cache block, with a line for each engine, on light and dark pages."""
    title = "How much of a shared system prompt the second request finds in the cache"
    parts, bottom = [_text(28, 38, title, 'font-size="20"')], TOP + HEIGHT
    for panel, (block, found) in enumerate(panels.items()):
        left = LEFT + STEP * panel
        parts.append(_text(left, TOP - 14, f"blocks of {block:,} ({BLOCKS[block]})"))
        for percent in range(0, 101, 25):
            y = bottom - HEIGHT * percent / 100
            parts.append(f'<path class="rule" d="M{left} {y}h{WIDTH}"/>')
            parts.append(_text(left - 4, y + 4, f"{percent}%", 'text-anchor="end"'))
        for tokens in range(0, LENGTHS[-1] + 1, 2000):
            x = left + WIDTH * tokens / LENGTHS[-1]
            parts.append(_text(x, bottom + 18, f"{tokens:,}", 'text-anchor="middle"'))
        for number, (name, line) in sorted(enumerate(found.items()), key=lambda each: each[0] == 0):  # Seamark on top
            stroke, x = f'class="l{number}" {STROKES[number]}', LEFT + 150 * number
            at = zip(LENGTHS, line, strict=True)
            points = " ".join(f"{left + WIDTH * x / LENGTHS[-1]:.1f},{bottom - HEIGHT * y:.1f}" for x, y in at)
            parts.append(f'<polyline {stroke} points="{points}"/>')
            if not panel:
                parts += [f'<path {stroke} d="M{x} 66h34"/>', _text(x + 42, 70, name)]
    parts.append(_text(460, bottom + 42, "shared tokens", 'text-anchor="middle"'))
    return HEAD + "\n".join(parts) + "</svg>\n"


def _text(x: float, y: float, text: str, attributes: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" {attributes}>{text}</text>'
