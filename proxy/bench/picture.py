"""The grid as an SVG, readable on light and dark pages: the curve over shared lengths, and a map for each mode."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import NamedTuple

from proxy.bench.cells import CellFamily, Lengths, Mode
from proxy.bench.stories import UNIT

WIDTH = 920

HEAD = 74  # title and subtitle

CURVE = 318  # curve with legend and axis, if there is one

MAP = 258  # a row of two maps

CARD = 12  # between the edge of the picture and its card

LEFT, RIGHT = 76, WIDTH - 40

MAP_WIDTH, ROW = 370, 22

LIGHT = {"card": "#ffffff", "edge": "#d5dade", "text": "#1d2730", "faint": "#5b6873", "rule": "#e3e7ea"}

DARK = {"card": "#12181e", "edge": "#303a43", "text": "#e8edf1", "faint": "#9fadb8", "rule": "#28323b"}

# Strokes of the lines, in light and dark; the first of Seamark's modes and the baselines have a curve.
LINES = (("#11808f", "#4fc4d3"), ("#e07a50", "#e07a50"), ("#4b2a8c", "#efe6ff"))

# Where the baselines agree, the thin dashes of the second lie on the first.
STROKES = ('stroke-width="3.5"', 'stroke-width="4"', 'stroke-width="2" stroke-dasharray="4 5"')

# Colours of the maps: nothing, half, everything delivered. They differ for every kind of colour vision.
LOW, MIDDLE, HIGH = (0xD0, 0x58, 0x2F), (0xF2, 0xDF, 0xB2), (0x11, 0x80, 0x8F)


class Point(NamedTuple):
    """Pixels from the upper left corner."""

    x: float
    y: float


def draw(families: Sequence[CellFamily]) -> str:
    """The SVG, families one below the other."""
    parts, top = [], 0.0
    for family in families:
        parts.append(f'<g transform="translate(0 {top:.0f})">{_family(family)}</g>')
        top += _height(family)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {top:.0f}" width="{WIDTH}" height="{top:.0f}"'
        ' role="img" font-family="system-ui, -apple-system, Segoe UI, Helvetica, Arial, sans-serif" font-size="13">'
        "<title>Hit efficiency of the second request with a shared prefix</title>"
        f"<style>{_style()}</style>\n" + "\n".join(parts) + "</svg>\n"
    )


def _style() -> str:
    def rules(theme: dict[str, str], column: int) -> str:
        lines = "".join(f".l{number}{{stroke:{pair[column]}}}" for number, pair in enumerate(LINES))
        return (
            f".card{{fill:{theme['card']};stroke:{theme['edge']}}}text{{fill:{theme['text']}}}"
            f".faint{{fill:{theme['faint']}}}.rule{{stroke:{theme['rule']}}}{lines}"
        )

    return f"{rules(LIGHT, 0)}@media(prefers-color-scheme:dark){{{rules(DARK, 1)}}}.on{{fill:#fff}}.off{{fill:#1d2730}}"


def _height(family: CellFamily) -> float:
    maps = (len(family.modes) + 1) // 2
    return HEAD + (CURVE if _curves(family) else 0) + maps * MAP + 2 * CARD


def _family(family: CellFamily) -> str:
    height = _height(family) - 2
    parts = [f'<rect class="card" x="1" y="1" width="{WIDTH - 2}" height="{height:.0f}" rx="{CARD}"/>']
    parts.append(_text(Point(28, 40), "How much of a shared prefix the second request gets", 'font-size="20"'))
    model = f"{family.name}, generated; cache block {family.block_size} tokens"
    under = f"{model}. Percent of the oracle hit: the shared tokens, rounded down to {UNIT}."
    parts.append(_text(Point(28, 63), under, 'class="faint"'))
    top = HEAD
    if _curves(family):
        parts.append(_curve_panel(family, top))
        top += CURVE
    for number, mode in enumerate(family.modes):
        parts.append(_map(mode, family, Point(28 + number % 2 * (WIDTH - 28) / 2, top + number // 2 * MAP)))
    return "\n".join(parts)


def _curves(family: CellFamily) -> list[Mode]:
    return [mode for mode in family.modes if mode.sweep]


def _curve_panel(family: CellFamily, top: float) -> str:
    curves, own = _curves(family), family.plan.sweep_own
    upper, lower = top + 52, top + 260
    longest = max(cell.shared for mode in curves for cell in mode.sweep)

    def place(shared: float, efficiency: float) -> Point:
        return Point(LEFT + (RIGHT - LEFT) * shared / longest, lower - (lower - upper) * efficiency)

    parts = []
    for percent in (0, 25, 50, 75, 100):
        y = place(0, percent / 100).y
        parts.append(_line(Point(LEFT, y), Point(RIGHT, y)))
        parts.append(_text(Point(LEFT - 8, y + 4), f"{percent}%", 'class="faint" text-anchor="end"'))
    for edge in range(0, longest + 1, family.block_size):
        x = place(edge, 0).x
        parts.append(_line(Point(x, upper - 8), Point(x, lower)))
        parts.append(_text(Point(x, lower + 20), str(edge), 'class="faint" text-anchor="middle"'))
    axis = f"shared prefix (tokens; a rule at every cache block), {own} tokens of its own in each prompt"
    parts.append(_text(Point((LEFT + RIGHT) / 2, lower + 42), axis, 'text-anchor="middle"'))
    parts.append(_upright(Point(28, (upper + lower) / 2), "hit efficiency"))
    x, lines = LEFT, []
    for number, mode in enumerate(curves):
        points = " ".join(f"{p.x:.1f},{p.y:.1f}" for p in (place(c.shared, c.efficiency) for c in mode.sweep))
        stroke = f'class="l{number}" fill="none" stroke-linejoin="round" {STROKES[number]}'
        lines.append(f'<polyline {stroke} points="{points}"/>')
        parts.append(f'<path {stroke} d="M{x} {top + 22}h34"/>{_text(Point(x + 42, top + 26), mode.name)}')
        x += 70 + 8 * len(mode.name)
    lines.append(lines.pop(0))  # Seamark's on top, the baselines in order
    return "\n".join(parts + lines)


def _map(mode: Mode, family: CellFamily, corner: Point) -> str:
    plan = family.plan
    left, top = corner.x + 54, corner.y + 40
    column, row = MAP_WIDTH / len(plan.shared), ROW
    title = f"{mode.name}: {100 * mode.efficiency:.2f}% of the oracle"
    parts = [_text(Point(left, top - 12), title, 'font-weight="600"')]
    efficiency = {cell.wanted: cell.efficiency for cell in mode.cells}
    for line, own in enumerate(reversed(plan.own)):
        y = top + line * row
        parts.append(_text(Point(left - 8, y + row - 7), str(own), 'class="faint" font-size="11" text-anchor="end"'))
        for number, shared in enumerate(plan.shared):
            parts.append(_field(efficiency[Lengths(shared, own)], Point(left + number * column, y), column, row))
    bottom = top + row * len(plan.own)
    for number, shared in enumerate(plan.shared):
        middle = Point(left + (number + 0.5) * column, bottom + 15)
        parts.append(_text(middle, str(shared), 'class="faint" font-size="11" text-anchor="middle"'))
    below = Point(left + MAP_WIDTH / 2, bottom + 33)
    parts.append(_text(below, "shared (tokens)", 'font-size="12" text-anchor="middle"'))
    parts.append(_upright(Point(corner.x + 6, (top + bottom) / 2), "own (tokens)"))
    return "\n".join(parts)


def _field(efficiency: float, corner: Point, width: float, height: float) -> str:
    percent = int(100 * efficiency)  # 99.9 must not look like everything
    shade = "off" if 20 <= percent < 85 else "on"
    place = f'x="{corner.x + 0.5:.1f}" y="{corner.y + 0.5:.1f}" width="{width - 1:.1f}" height="{height - 1:.1f}"'
    middle = Point(corner.x + width / 2, corner.y + height / 2 + 4)
    number = _text(middle, str(percent), f'class="{shade}" font-size="11" text-anchor="middle"')
    return f'<rect {place} rx="2" fill="{_colour(efficiency)}"/>{number}'


def _colour(efficiency: float) -> str:
    low, high, part = (LOW, MIDDLE, 2 * efficiency) if efficiency < 0.5 else (MIDDLE, HIGH, 2 * efficiency - 1)
    return "#" + "".join(f"{round(a + (b - a) * min(part, 1)):02x}" for a, b in zip(low, high, strict=True))


def _text(at: Point, text: str, attributes: str = "") -> str:
    return f'<text x="{at.x:.1f}" y="{at.y:.1f}" {attributes}>{escape(text)}</text>'


def _upright(at: Point, text: str) -> str:
    return _text(at, text, f'font-size="12" text-anchor="middle" transform="rotate(-90 {at.x:.1f} {at.y:.1f})"')


def _line(start: Point, end: Point) -> str:
    return f'<path class="rule" d="M{start.x:.1f} {start.y:.1f}L{end.x:.1f} {end.y:.1f}"/>'
