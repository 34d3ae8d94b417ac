"""`seamark bench grid`: what it says of its measurements, and the picture."""

from __future__ import annotations

import json
from dataclasses import replace
from xml.etree import ElementTree

import pytest

from proxy.bench import grid, picture
from proxy.bench.cells import Cell, CellFamily, CellPlan, Lengths, Mode

SVG = "{http://www.w3.org/2000/svg}"

PLAN = CellPlan((50, 163, 469), (5, 75), 75, 1200)


def family(delivered: float = 1.0) -> CellFamily:
    """A made-up result in which Seamark's second mode is given the part `delivered` of the longest prefix."""

    def mode(name: str, ours: bool, part: float, curve: bool = True) -> Mode:
        cells = []
        for lengths in (*PLAN.grid, *(PLAN.sweep(384) if curve else ())):
            cell = Cell(lengths, *lengths, delivered=0)
            cells.append(replace(cell, delivered=int(cell.oracle * (part if cell.shared == 469 else 1))))
        split = len(PLAN.grid)
        return Mode(name, ours, tuple(cells[:split]), tuple(cells[split:]), 1.0)

    modes = (
        mode("Seamark, gateway", True, 1.0),
        mode("Seamark, hints", True, delivered, curve=False),
        mode("vLLM alone", False, 0.5),
        mode("vLLM, unit 16", False, 0.5),
    )
    return CellFamily("nemotron_h", 384, PLAN, modes, 4.0)


def test_the_curve_has_both_sides_of_every_place_where_a_hit_changes():
    shared = [lengths.shared for lengths in PLAN.sweep(384)]
    assert {383, 384, 767, 768} <= set(shared)  # edges of a block
    assert {307, 311, 691, 695} <= set(shared)  # the own part of 75 tokens begins to reach across one
    assert min(shared) == 50 and max(shared) < PLAN.sweep_to and shared == sorted(set(shared))


def test_the_worst_cell_is_the_least_efficient_and_the_longest_of_those():
    cells = (Cell(Lengths(50, 5), 50, 5, 0), Cell(Lengths(163, 5), 163, 5, 0), Cell(Lengths(469, 5), 469, 5, 384))
    assert Mode("any", False, cells, (), 0.0).worst.shared == 163


def test_the_table_rounds_down():
    tables = grid.render(family(delivered=463 / 464))
    assert "Seamark, hints: 99.85% of 1344 tokens, worst 463 of 464 at 469 shared, 5 own" in tables
    assert tables.splitlines().count("           469    99    99") == 1


def test_a_coarser_unit_is_judged_by_what_it_allows_and_shown_beside_the_finest():
    cell = Cell(Lengths(120, 5), 120, 5, 64)  # 112 with units of 16
    modes = (Mode("Seamark, hints", True, (cell,), (), 1.0),)
    coarse = CellFamily("qwen3_next", 384, CellPlan((120,), (5,), 5, 0), modes, 1.0, unit=64)
    assert "57.14% of 112 tokens, 100.00% of what its unit of 64 allows, worst 64 of 112" in grid.render(coarse)
    assert not grid.complaints(coarse) and grid.complaints(replace(coarse, unit=16))


def test_beside_drafts_a_cell_is_judged_by_what_they_leave():
    cell = Cell(Lengths(163, 5), 163, 5, 144)  # 160 without drafts
    modes = (Mode("Seamark, hints", True, (cell,), (), 1.0),)
    drafting = CellFamily("nemotron_h with MTP", 384, CellPlan((163,), (5,), 5, 0), modes, 1.0, ahead=16)
    assert "90.00% of 160 tokens, 100.00% of what its unit of 16 and drafts that need 16 more allows" in grid.render(
        drafting
    )
    assert not grid.complaints(drafting) and grid.complaints(replace(drafting, ahead=0))


@pytest.mark.parametrize(("delivered", "status"), [(1.0, 0), (0.97, 1)])
def test_the_exit_status_tells_whether_seamark_gave_enough(delivered, status, monkeypatch, tmp_path, capsys):
    async def made_up(name, plan, say, drafts):
        return replace(family(delivered), name=name)

    monkeypatch.setattr(grid, "measure_family", made_up)
    monkeypatch.setattr(grid, "narrator", lambda: print)
    files = ["--json", str(tmp_path / "grid.json"), "--picture", str(tmp_path / "grid.svg")]
    assert grid.main(["--family", "nemotron_h", "--family", "qwen3_next", *files]) == status
    printed = capsys.readouterr().out
    complaint = "qwen3_next, Seamark, hints: 97.92% is less than 99%; worst 450 of 464 at 469 shared, 5 own"
    assert (complaint in printed) == bool(status)
    report = json.loads((tmp_path / "grid.json").read_text())
    assert [entry["name"] for entry in report] == ["nemotron_h", "qwen3_next"]
    hints = report[1]["modes"][1]
    assert hints["worst"]["shared"] == 469 if status else hints["efficiency"] == 1
    assert hints["cells"][0] == {"wanted": [50, 5], "shared": 50, "own": 5, "delivered": 48, "oracle": 48}
    ElementTree.parse(tmp_path / "grid.svg")


def test_a_file_that_cannot_be_written_is_refused_before_anything_is_measured(tmp_path, capsys):
    with pytest.raises(SystemExit) as stopped:
        grid.main(["--picture", str(tmp_path / "none" / "grid.svg")])
    assert stopped.value.code == 2 and "grid.svg" in capsys.readouterr().err


def test_the_picture_has_a_line_per_curve_a_field_per_cell_and_colours_for_light_and_dark():
    drawn = picture.draw([family(0.5)])
    root = ElementTree.fromstring(drawn)
    _, _, width, height = map(float, root.get("viewBox").split())
    assert len(root.findall(f".//{SVG}polyline")) == 3
    assert len(root.findall(f".//{SVG}rect")) == 1 + 4 * len(PLAN.grid)
    texts = [text.text for text in root.iter(f"{SVG}text")]
    assert {"Seamark, gateway", "vLLM alone", "vLLM, unit 16", "shared (tokens)", "own (tokens)"} <= set(texts)
    assert "prefers-color-scheme:dark" in drawn
    for element in root.iter():
        if element.get("x") is not None:
            assert 0 <= float(element.get("x")) <= width and 0 <= float(element.get("y")) <= height


def test_a_grid_without_a_curve_is_drawn_too():
    flat = family()
    modes = tuple(replace(mode, sweep=()) for mode in flat.modes)
    root = ElementTree.fromstring(picture.draw([replace(flat, modes=modes)]))
    assert not root.findall(f".//{SVG}polyline") and root.findall(f".//{SVG}rect")
