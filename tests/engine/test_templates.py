"""Chat templates with the quirks of real ones, on vLLM's own renderer, with two tokenizers."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.harness.render_models import markers_in, render_server, write_render_model
from tests.harness.template_shapes import Cell, check_templates, total

TEMPLATES = {path.stem: path.read_text() for path in sorted((Path(__file__).parents[1] / "templates").glob("*.jinja"))}

# Before a user's text these have words that differ from chat to chat, so nothing is learnt there.
WITHOUT_OPENER = {"system-in-last-user", "tools-in-first-user"}


@pytest.fixture(scope="module", params=["special", pytest.param("plain", marks=pytest.mark.thorough)])
def cells(request, model, tmp_path_factory) -> list[Cell]:
    """Every quirk template with every shape of chat, by markers as special tokens and as plain text."""
    markers = markers_in(TEMPLATES.values()) if request.param == "special" else []
    folder = write_render_model(tmp_path_factory.mktemp(request.param), model / "config.json", markers)
    with render_server(folder) as url:
        return asyncio.run(check_templates(url, TEMPLATES, request.param))


def test_nothing_learnt_is_wrong_and_no_opener_leads_behind_its_place(cells):
    assert not [cell for cell in cells if cell.wrong]


def test_the_tokens_behind_the_last_message_are_always_known_but_where_the_template_refuses_to_say(cells):
    ends = total(cells)["ends"]
    assert set(ends) <= {"right", "early"}, cells
    assert ends["right"] > 50 * ends["early"]
    assert {cell.template for cell in cells if not cell.refused and not cell.ends} - {
        cell.template for cell in cells if cell.ends
    } == {"strict-roles"}


def test_openers_lead_to_where_chats_part_in_nearly_all_shapes(cells):
    usual = [cell for cell in cells if cell.template not in WITHOUT_OPENER]
    found = total(usual)
    # An id stands before the results of one template.
    assert set(found["last:"]) <= {"exact", "1 before", "2..24 before"}, cells
    assert found["last:"]["exact"] > 0.9 * sum(found["last:"].values())
    assert set(found["first:"]) <= {"exact", "1 before"}, cells


def test_only_what_is_listed_is_not_known(cells):
    unknown = {cell.template for cell in cells if "not known" in {**cell.last, **cell.first}}
    assert unknown == WITHOUT_OPENER, cells


def test_every_shape_is_taken_by_nearly_every_template(cells):
    refused = [cell for cell in cells if cell.refused]
    assert len(refused) < len(cells) / 10, refused
