"""llm-comply's suites: an engine behind the gateway gets the verdicts that it gets alone, case by case.

A random model never stops and never repeats itself, so every request that would be answered is made greedy and short;
what is left of chance is identifiers, which the verdicts quote.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from importlib.resources import files
from typing import NamedTuple

import pytest
from llm_comply import http, runner, test_case  # modules: pytest takes classes called Test... for tests
from llm_comply.config import ComplianceConfig
from llm_comply.schema import SpecLoader
from llm_comply.tests import get_tests

from proxy.bench.harness.servers import MODEL_NAME
from tests.harness.engines import SharedServers


class Suite(NamedTuple):
    """One of llm-comply's formats."""

    spec: str
    cases: int  # of version 0.5: a case that vanished would be equal on both sides
    greedy: Mapping[str, object]  # added to each request


SUITES = {
    "openai-chat": Suite("openai_chat.json", 9, {"temperature": 0, "max_tokens": 24}),
    "open-responses": Suite("openresponses.json", 13, {"temperature": 0, "max_output_tokens": 24}),
    "anthropic": Suite("anthropic.json", 9, {"temperature": 0}),
}

_IDENTIFIER = re.compile(r"\b(msg|resp|chatcmpl|call|toolu|rs|fc)[_-]\w+")


class Verdict(NamedTuple):
    """llm-comply's words about one case."""

    status: str
    errors: tuple[str, ...]
    warnings: tuple[str, ...]


def greedy(case: test_case.TestCase, fields: Mapping[str, object]) -> test_case.TestCase:
    """The case with an answer that is the same each time."""

    def build(config: ComplianceConfig) -> dict[str, object]:
        body = {**case.build_request(config), **fields}
        return {**body, "max_tokens": 24} if "max_tokens" in body else body  # where it lacks, that is the case

    return dataclasses.replace(case, build_request=build)


def verdicts(url: str, name: str) -> Mapping[str, Verdict]:
    """Verdicts by case."""
    suite = SUITES[name]
    config = ComplianceConfig(base_url=url + "/v1", api_key="unused", model=MODEL_NAME)
    spec = SpecLoader(str(files("llm_comply") / "specs" / suite.spec))
    cases = [greedy(case, suite.greedy) for case in get_tests(name)]
    http.close_client()  # its kept connections may have been idle for longer than servers keep them
    return {
        result.id: Verdict(result.status.value, masked(result.errors), masked(result.warnings))
        for result in runner.TestRunner(config, cases, spec).run_all().results
    }


def masked(complaints: list[str]) -> tuple[str, ...]:
    return tuple(_IDENTIFIER.sub(r"\1", complaint) for complaint in complaints)


@pytest.mark.filterwarnings("ignore:jsonschema.RefResolver")  # llm-comply's
@pytest.mark.parametrize("name", SUITES)
def test_llm_comply_judges_the_gateway_as_it_judges_the_engine(servers: SharedServers, name):
    alone, behind = verdicts(servers.seamark.url, name), verdicts(servers.gateway.url, name)
    assert len(alone) == SUITES[name].cases
    assert len(set(alone.values())) >= 3  # or what is compared says nothing
    differing = [
        f"{case}\n  engine alone        {alone.get(case)}\n  behind the gateway  {behind.get(case)}"
        for case in alone | behind
        if alone.get(case) != behind.get(case)
    ]
    assert not differing, "\n".join(differing)
