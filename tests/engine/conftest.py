"""Real engines shared by the whole run, started when the first test asks for one and ended with the run."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from proxy.bench.harness import planted
from proxy.bench.harness.planted import plugin_environment
from proxy.bench.harness.servers import QWEN3_NEXT, Servers, generated_model
from tests.harness.engines import FLOAT32_DELTA, TRUSTED_HOP, SharedServers
from tests.harness.gateways import knows_templates
from tests.harness.waiting import wait_for


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


@pytest.fixture(scope="session")
def servers(model: Path, family: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SharedServers]:
    """All of them, started at once: each takes half a minute alone. They compute in float32."""
    folder = tmp_path_factory.mktemp("servers")
    needed, flags = (FLOAT32_DELTA, ("--dtype", "float32")) if family == QWEN3_NEXT else ({}, ())
    environment = plugin_environment(folder / "plugins", needed)
    with Servers(folder) as fleet:
        # A parser, without which vLLM refuses requests that offer tools.
        tools = ("--enable-auto-tool-choice", "--tool-call-parser", "hermes")
        store = {"VLLM_ENABLE_RESPONSES_API_STORE": "1", "SEAMARK_HINTS_FROM": TRUSTED_HOP}
        seamark = fleet.engine(
            "seamark", model, "1", (*flags, *tools), {**planted.environment(folder / "planted", needed), **store}
        )
        tight_flags = ("--num-gpu-blocks-override", "64", "--max-num-batched-tokens", "320")
        may_sleep = {**environment, "VLLM_SERVER_DEV_MODE": "1", "SEAMARK_PIN_SHARE": "0.5"}
        tight = fleet.engine("tight", model, flags=(*flags, *tools, *tight_flags), environment=may_sleep)
        off = ("--no-enable-prefix-caching",)
        reference = fleet.engine("reference", model, "reference", (*flags, *tools, *off), environment)
        untouched = fleet.engine("untouched", model, "0", flags, environment)
        started = SharedServers(
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
        for gateway in (started.gateway, started.tight_gateway):
            # On a busy machine a worker may be up before its templates are known.
            wait_for(partial(knows_templates, gateway), seconds=120)
        yield started
