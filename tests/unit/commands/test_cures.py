"""The doctor's cures are lines for the way in which vLLM is run, and name what is known of it: `golden/cures.txt`."""

from __future__ import annotations

import pytest

from proxy.commands.cures import TOOL_PARSERS, Cures
from proxy.commands.ways import FoundWay, Way


def cures(way: Way, name: str = "", model: str = "org/my m", local: bool = True) -> Cures:
    return Cures(FoundWay(way, name), model, 8001, local)


def all_lines(own: Cures) -> str:
    parts = (own.install(), own.update("0.3"), own.flag("--x", "why"), own.drafts(), own.tools(), own.trial())
    lines = "\n\n".join((*parts, own.closed()))
    assert all(line.startswith("    ") for line in lines.splitlines() if line)
    return lines


@pytest.mark.parametrize("way", list(Way))
def test_each_way_has_lines_of_its_own_that_name_what_was_found(way, expect_golden):
    expect_golden("cures", f"{way}", all_lines(cures(way)))
    expect_golden("cures", f"{way}, named, elsewhere", all_lines(cures(way, "llm", local=False)))


@pytest.mark.parametrize(
    ("model", "parser"),
    [*((f"org/{family.upper()}-7B", parser) for family, parser in TOOL_PARSERS.items()), ("qwen3-next/mine", "NAME")],
)
def test_a_parser_of_tools_is_told_by_the_models_name(model, parser):
    assert f"--enable-auto-tool-choice --tool-call-parser {parser}   # " in cures(Way.PIP, model=model).tools()
