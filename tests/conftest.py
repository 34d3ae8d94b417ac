"""What tests of every tier share. The folder of a test decides its tier, process, time limit and imports."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path

import httpx._transports.default as transports
import hypothesis
import hypothesis.configuration
import pytest
from xdist.remote import Producer
from xdist.scheduler import LoadScopeScheduling

from proxy.bench.harness.servers import MATCH_UNITS, NEMOTRON_H, Servers
from tests.harness.api_keys import entry
from tests.harness.gateways import GatewayForks
from tests.harness.in_memory_gateway import InMemoryGateway, in_memory_gateway
from tests.harness.raw_worker import RawWorker
from tests.harness.recording_worker import RecordingWorker, recording_worker
from tests.harness.started_engines import pytest_configure, pytest_terminal_summary  # noqa: F401  # hooks

FOLDER = Path(__file__).parent

# No model of a test is on a hub. Where none answers, each look there takes half a minute.
os.environ["HF_HUB_OFFLINE"] = "1"

# A shell starts what is in its background with an ignored Ctrl-C, which no script below it could then hear.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Properties and machines: the same examples on every run. `make test-fast ARGS=--hypothesis-profile=long` draws anew.
# Where a mistake was planted (tests/bench/mutants.py) the first example that shows it is enough.
hypothesis.configuration.set_hypothesis_home_dir(FOLDER.parent / ".cache" / "hypothesis")
for name, differs in {
    "fixed": {"derandomize": True},
    "planted": {"derandomize": True, "phases": (hypothesis.Phase.explicit, hypothesis.Phase.generate)},
    "long": {"max_examples": 5000},
}.items():
    hypothesis.settings.register_profile(name, database=None, deadline=None, **{"max_examples": 50, **differs})
hypothesis.settings.load_profile("fixed")

# Each of these asks for engines that are started once (tests/engine/conftest.py).
SHARED_ENGINES = "tests/engine/shared/"

# What these tests import takes seconds: no engine, and nothing that one is made of.
FAST = {"unit", "gateway"}

HEAVY = {"vllm", "torch", "transformers"}

# Seconds for one test with an engine; the first one waits for all shared engines. Fast tests: pyproject.toml.
ENGINE_TIMEOUT = 1200


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--family",
        choices=MATCH_UNITS,
        default=NEMOTRON_H,
        help="of the model that real engines run, in float32 (tests/engine/shared/test_exact.py)",
    )


@pytest.fixture
def engine_log(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> pytest.LogCaptureFixture:
    """What the plugin logs, warnings and worse."""
    logger = logging.getLogger("vllm.seamark")
    monkeypatch.setattr(logger, "propagate", False)  # once vLLM has set up its own tree, nothing comes to the root
    monkeypatch.setattr(logger, "handlers", [caplog.handler])
    monkeypatch.setattr(logger, "disabled", False)  # setting up a tree switches off the loggers that are there already
    caplog.set_level(logging.WARNING, "vllm.seamark")
    return caplog


def tier(item: pytest.Item) -> str:
    """The folder directly under `tests`."""
    return item.path.relative_to(FOLDER).parts[0]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give each test its time limit. A test that ends a server comes last."""
    for item in items:
        if tier(item) not in FAST:
            item.add_marker(pytest.mark.timeout(ENGINE_TIMEOUT), append=False)
    items.sort(key=lambda item: item.get_closest_marker("ends_a_server") is not None)


@pytest.hookimpl(optionalhook=True)  # pytest-xdist's
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> LoadScopeScheduling:
    """Tests of the shared engines run in one process; the files of all others go to whichever process is free."""

    class SharedEnginesTogether(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return SHARED_ENGINES if nodeid.startswith(SHARED_ENGINES) else nodeid.split("::")[0]

    return SharedEnginesTogether(config, log)


@pytest.fixture(autouse=True)
def no_library_is_preloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM in this process wants libraries preloaded in the next ones; below a folder with a space, ld.so complains."""
    monkeypatch.setenv("LD_PRELOAD", "")  # and afterwards as it was


@pytest.fixture(scope="session", autouse=True)
def certificates_are_read_once_and_busy_servers_waited_for() -> Iterator[None]:
    """httpx's clients read those of all authorities, which takes ten times as long as a request; and wait for 5 s."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("httpx._config.DEFAULT_TIMEOUT_CONFIG.read", 120.0)
        patched.setattr(transports, "create_ssl_context", functools.cache(transports.create_ssl_context))
        yield


@pytest.fixture(scope="session", autouse=True)
def fast_tests_import_no_engine(request: pytest.FixtureRequest) -> Iterator[None]:
    """A run of fast tests alone ends in an error if any of them has imported what they have to do without."""
    yield
    if {tier(item) for item in request.session.items} <= FAST:
        imported = HEAVY & sys.modules.keys()
        assert not imported, f"tests/unit and tests/gateway must not import {', '.join(sorted(imported))}"


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Servers]:
    """Servers that end with the test."""
    with GatewayForks(tmp_path) as started:
        yield started


@pytest.fixture
async def in_memory(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Callable[..., Awaitable[InMemoryGateway]]]:
    """Starts gateways before workers in this process; they end with the test."""
    for name, seconds in GatewayForks.PATIENCE.items():
        monkeypatch.setattr(name, seconds)
    async with contextlib.AsyncExitStack() as started:
        yield lambda *workers, **settings: started.enter_async_context(in_memory_gateway(*workers, **settings))


@pytest.fixture
def worker(request: pytest.FixtureRequest) -> Iterator[RecordingWorker]:
    """A worker that records what it gets; under a real HTTP server unless the test's gateway is one in memory."""
    if "in_memory" in request.fixturenames:
        yield RecordingWorker()
        return
    with recording_worker() as started:
        yield started


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    """A file of API keys: two clients who share what is cached, one who does not, and an operator."""
    names = {"ann": {}, "bob": {"share": "team"}, "cleo": {"share": "team"}, "root": {"admin": True}}
    file = tmp_path / "keys.toml"
    file.write_text("".join(entry(name, **fields) for name, fields in names.items()))
    return file


@pytest.fixture
async def raw() -> AsyncIterator[RawWorker]:
    """A worker on a socket, whose every byte the test says."""
    async with RawWorker() as made:
        yield made
