"""Chat templates with the quirks of real ones, on vLLM's own renderer, with two tokenizers."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.bench.templates import Cell, Excuse, check_templates, report
from tests.harness.render_models import markers_in, render_server, write_render_model

TEMPLATES = {path.stem: path.read_text() for path in sorted((Path(__file__).parents[1] / "templates").glob("*.jinja"))}

EXCUSES = (
    Excuse("system-in-last-user", "", "turn", "system prompt and tools stand in the last user message"),
    Excuse("strict-roles", "", "turn", "a chat without the words that ask for an answer is refused"),
)


@pytest.fixture(scope="module", params=["special", "plain"])
def cells(request, model, tmp_path_factory) -> list[Cell]:
    """Every quirk template with every shape of chat, by markers as special tokens and as plain text."""
    markers = markers_in(TEMPLATES.values()) if request.param == "special" else []
    folder = write_render_model(tmp_path_factory.mktemp(request.param), model / "config.json", markers)
    with render_server(folder) as url:
        return asyncio.run(check_templates(url, TEMPLATES, request.param, EXCUSES))


def test_positions_lie_where_chats_really_part(cells):
    assert not [cell for cell in cells if cell.wrong], report(cells)


def test_only_what_is_listed_with_its_reason_has_none(cells):
    excused = {cell.template for cell in cells if cell.excused}
    assert excused == {"system-in-last-user", "strict-roles"}


def test_every_shape_is_taken_by_nearly_every_template(cells):
    refused = [cell for cell in cells if cell.refused]
    assert len(refused) < len(cells) / 10, report(refused)
