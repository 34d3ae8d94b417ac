"""What all tests share. The folder of a test decides its tier, and which process of the run it goes to."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from proxy.bench.harness.servers import MATCH_UNITS, NEMOTRON_H, Servers, generated_model
from tests.harness.recording_worker import RecordingWorker, recording_worker

# Tests in these folders start engines of their own, or want the machine as quiet as it can be.
WITH_ENGINES = ("tests/engine/", "tests/upstream/")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--family",
        choices=MATCH_UNITS,
        default=NEMOTRON_H,
        help="of the model that real engines run, in float32 (tests/engine/test_exact.py)",
    )


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What ends a server that others ask comes last."""
    items.sort(key=lambda item: item.get_closest_marker("ends_a_server") is not None)


@pytest.hookimpl(optionalhook=True)  # pytest-xdist's
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> object:
    """Files with real engines one after another in one process of the run, everything else in the other."""
    from xdist.scheduler import LoadScopeScheduling

    class EnginesTogether(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return "engines" if nodeid.startswith(WITH_ENGINES) else nodeid

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


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Servers]:
    """Servers that end with the test."""
    with Servers(tmp_path) as started:
        yield started


@pytest.fixture
def worker() -> Iterator[RecordingWorker]:
    """A worker that records what it gets."""
    with recording_worker() as started:
        yield started
