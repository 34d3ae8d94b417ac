"""Real servers shared by the whole run, started when the first test asks for one and ended with the run."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

from proxy.bench import planted, plugins
from proxy.bench.engines import Fleet, Server
from proxy.bench.models import MATCH_UNITS, NEMOTRON_H, QWEN3_NEXT, generated_model
from tests.recording_worker import RecordingWorker, recording_worker

FLOAT32_DELTA = {"seamark_float32_delta": "tests.float32_delta:register"}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--family",
        choices=MATCH_UNITS,
        default=NEMOTRON_H,
        help="of the model that real engines run, in float32 (test_engine_exact)",
    )


# These start engines of their own, or want the machine as quiet as it can be.
WITH_ENGINES = {
    "test_boundary_cost",
    "test_cost",
    "test_demo",
    "test_executors",
    "test_fan_out",
    "test_gpu_check",
    "test_grid",
    "test_prediction",
    "test_sharing",
    "test_soak",
    "test_templates",
    "test_two_workers",
    "test_upstream",
}


_USES_SERVERS = re.compile(r"def \w+\([^)]*\bservers\b")


@cache
def _has_engines(file: str) -> bool:
    path = Path(file)
    return path.stem in WITH_ENGINES or _USES_SERVERS.search(path.read_text()) is not None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What ends a server that others ask comes last."""
    items.sort(key=lambda item: item.get_closest_marker("ends_a_server") is not None)


@pytest.hookimpl(optionalhook=True)  # pytest-xdist's
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> object:
    """Files with real engines one after another in one process of the run, everything else in the other."""
    from xdist.scheduler import LoadScopeScheduling

    class EnginesTogether(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return "engines" if _has_engines(nodeid.split("::")[0]) else nodeid

    return EnginesTogether(config, log)


@pytest.fixture(scope="session")
def family(request: pytest.FixtureRequest) -> str:
    """Family of the generated model."""
    return request.config.getoption("--family")


@pytest.fixture(scope="session")
def model(family: str) -> Path:
    """Folder of the generated model."""
    return generated_model(print, family)


@pytest.fixture(scope="session")
def tokenizer(model: Path):
    """Tokenizer and chat template of the generated model."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(model)


class Servers(NamedTuple):
    """Engines in the configurations that the tests need."""

    seamark: Server  # patched, room to cache
    planted: Path  # where defects can be planted in it
    tight: Server  # patched, 64 cache blocks and 320 tokens per step
    reference: Server  # cures only, no prefix caching
    untouched: Server  # vLLM as it is
    gateway: Server  # in front of `seamark`
    tight_gateway: Server
    untouched_gateway: Server


@pytest.fixture(scope="session")
def servers(model: Path, family: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    """All of them, started at once: each takes half a minute alone. They compute in float32."""
    folder = tmp_path_factory.mktemp("servers")
    needed, flags = (FLOAT32_DELTA, ("--dtype", "float32")) if family == QWEN3_NEXT else ({}, ())
    environment = plugins.environment(folder / "plugins", needed)
    with Fleet(folder) as fleet:
        # A parser, without which vLLM refuses requests that offer tools.
        tools = ("--enable-auto-tool-choice", "--tool-call-parser", "hermes")
        store = {"VLLM_ENABLE_RESPONSES_API_STORE": "1"}
        seamark = fleet.engine(
            "seamark", model, "1", (*flags, *tools), {**planted.environment(folder / "planted", needed), **store}
        )
        tight_flags = ("--num-gpu-blocks-override", "64", "--max-num-batched-tokens", "320")
        tight = fleet.engine("tight", model, flags=(*flags, *tools, *tight_flags), environment=environment)
        off = ("--no-enable-prefix-caching",)
        reference = fleet.engine("reference", model, "reference", (*flags, *tools, *off), environment)
        untouched = fleet.engine("untouched", model, "0", flags, environment)
        started = Servers(
            seamark,
            folder / "planted",
            tight,
            reference,
            untouched,
            fleet.gateway(seamark),
            fleet.gateway(tight),
            fleet.gateway(untouched),
        )
        for engine in (seamark, tight, reference, untouched):
            engine.wait_until_ready()
        for gateway in (started.gateway, started.tight_gateway, started.untouched_gateway):
            gateway.wait_until_ready("/ready", seconds=30)
        yield started


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    """Servers that end with the test."""
    with Fleet(tmp_path) as started:
        yield started


@pytest.fixture
def worker() -> Iterator[RecordingWorker]:
    """A worker that records what it gets."""
    with recording_worker() as started:
        yield started
