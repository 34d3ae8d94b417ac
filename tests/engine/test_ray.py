"""Workers that Ray starts: what they see of Seamark's settings, and the states they write. `make test-ray` runs it.

Ray's own processes are started without these settings, as those of a cluster are: what a worker sees comes from vLLM.
"""

from __future__ import annotations

import os
import re
import secrets
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path

import pytest

from proxy.bench.harness import exact
from proxy.bench.harness.client import complete, fresh_tokens, open_client
from proxy.bench.harness.planted import plugin_environment
from proxy.bench.harness.servers import ENGINE_ENVIRONMENT, Server, Servers
from proxy.commands.render_server import free_port
from tests.harness import versions
from tests.harness.engines import CPU_PROCESS, EAGER_STAGES
from tests.harness.ray_offline import FOUND
from tests.harness.ray_workers import SETTINGS
from tests.harness.waiting import wait_for

pytestmark = [pytest.mark.on_request, pytest.mark.timeout(900)]

PLUGINS = {"seamark_test_settings": "tests.harness.ray_workers:say_settings", **EAGER_STAGES}

PLATFORM = {"seamark_test_platform": "tests.harness.ray_workers:platform"}

SHOWN = "SEAMARK_STATE_SHARE=0.4"  # a setting that these engines have, and Ray's processes do not

NEWER, OLDER = "1", "0"  # of vLLM's two executors; 0.33 has the newer one alone


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    with Servers(tmp_path_factory.mktemp("ray")) as started:
        yield started


@pytest.fixture(scope="module")
def cluster(fleet: Servers, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mapping[str, str]]:
    """The environment of an engine that finds a Ray of this machine, which believes to have two GPUs."""
    environment = {
        **ENGINE_ENVIRONMENT,
        **CPU_PROCESS,
        **plugin_environment(tmp_path_factory.mktemp("plugins"), PLUGINS, PLATFORM),
        "RAY_AUTH_MODE": "token",  # whoever can talk to Ray can run anything
        "RAY_AUTH_TOKEN": secrets.token_hex(16),
        "RAY_DEDUP_LOGS": "0",
        "RAY_USAGE_STATS_ENABLED": "0",
    }
    environment["PYTHONPATH"] += os.pathsep.join(("", str(versions.ray()), str(versions.ROOT)))
    port = free_port()
    with tempfile.TemporaryDirectory(prefix="ray-") as sessions:  # paths of sockets are short
        flags = {
            "--port": port,
            "--num-gpus": 2,
            "--num-cpus": 2,
            "--min-worker-port": 0,
            "--max-worker-port": 0,
            "--include-dashboard": "false",
            "--object-store-memory": 100_000_000,
            "--temp-dir": sessions,
        }
        command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block"]
        head = fleet.start(
            "ray", port, [*command, *(str(word) for flag in flags.items() for word in flag)], environment
        )
        wait_for(partial(_is_up, head), seconds=120)
        yield {**environment, "RAY_ADDRESS": f"127.0.0.1:{port}", **dict([SHOWN.split("=")])}
        head.stop()


def _is_up(head: Server) -> bool:
    log = head.log.read_text()
    assert head.process.poll() is None, log
    return "Ray runtime started" in log


def _told_to_workers(output: str) -> list[str]:
    return re.findall(rf"\(RayWorker\w+ pid=\d+\).*{re.escape(SETTINGS)}(.*)", output)


@pytest.mark.parametrize(
    ("executor", "flags"),
    [(NEWER, ("--pipeline-parallel-size", "2")), (OLDER, ("--tensor-parallel-size", "2"))],
    ids=["pipeline stages", "the older executor"],
)
async def test_workers_of_ray_know_the_settings_and_write_the_same_states(
    fleet: Servers, cluster: Mapping[str, str], model: Path, executor: str, flags: tuple[str, ...]
):
    environment = {**cluster, "VLLM_USE_RAY_V2_EXECUTOR_BACKEND": executor, "VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    backend = ("--distributed-executor-backend", "ray")
    engine = fleet.engine("on-ray", model, "1", (*backend, *flags), environment)
    engine.wait_until_ready()
    wait_for(lambda: len(_told_to_workers(engine.log.read_text())) == 2, seconds=60)
    assert all(SHOWN in told for told in _told_to_workers(engine.log.read_text()))
    reference = fleet.engine("reference", model, "reference", ("--no-enable-prefix-caching",))
    reference.wait_until_ready()
    prompt = fresh_tokens(540, "ray")
    async with open_client(300) as client:
        for shared, own, hit in ((500, 40, 0), (500, 25, 496), (163, 9, 160), (163, 200, 160)):
            asked = [*prompt[:shared], *reversed(prompt[:own])]
            answer = await complete(client, engine.url, asked, vllm_xargs={"seamark_boundaries": [163, 500]})
            right = await complete(client, reference.url, asked)
            assert answer.cached_tokens == hit
            assert exact.compare(answer, right).exact
    engine.stop()
    reference.stop()


@pytest.mark.parametrize("executor", [NEWER, OLDER], ids=["newer", "older"])
def test_a_batch_job_without_a_server_gives_its_workers_the_settings(
    cluster: Mapping[str, str], model: Path, executor: str
):
    """Nothing collects reports there."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.harness.ray_offline", str(model)],
        env={**os.environ, **cluster, "VLLM_USE_RAY_V2_EXECUTOR_BACKEND": executor},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    (told,) = _told_to_workers(done.stdout + done.stderr)
    assert SHOWN in told
    assert f"{FOUND} 160" in done.stdout.splitlines()
