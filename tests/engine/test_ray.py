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
from pathlib import Path

import pytest

from proxy.bench.harness.planted import plugin_environment
from proxy.bench.harness.servers import ENGINE_ENVIRONMENT, Servers, free_port
from tests.harness import versions
from tests.harness.engines import CPU_PROCESS
from tests.harness.ray_workers import FOUND, SETTINGS
from tests.harness.waiting import wait_for

pytestmark = [pytest.mark.on_request, pytest.mark.timeout(900)]

PLUGINS = {"seamark_test_settings": "tests.harness.ray_workers:say_settings"}

PLATFORM = "[vllm.platform_plugins]\nseamark_test_platform = tests.harness.ray_workers:platform\n"

SHOWN = "SEAMARK_STATE_SHARE=0.4"  # a setting that these engines have, and Ray's processes do not


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mapping[str, str]]:
    """The environment of an engine that finds a Ray of this machine, which believes to have two GPUs."""
    plugins = tmp_path_factory.mktemp("plugins")
    environment = {
        **ENGINE_ENVIRONMENT,
        **CPU_PROCESS,
        **plugin_environment(plugins, PLUGINS),
        "RAY_AUTH_MODE": "token",  # whoever can talk to Ray can run anything
        "RAY_AUTH_TOKEN": secrets.token_hex(16),
        "RAY_DEDUP_LOGS": "0",
        "RAY_USAGE_STATS_ENABLED": "0",
    }
    with next(plugins.rglob("entry_points.txt")).open("a") as entry_points:
        entry_points.write(PLATFORM)
    environment["PYTHONPATH"] += os.pathsep.join(("", str(versions.ray()), str(versions.ROOT)))
    port = free_port()
    flags = f"--port {port} --num-gpus 2 --num-cpus 2 --min-worker-port 0 --max-worker-port 0 --include-dashboard false"
    flags += " --object-store-memory 100000000"
    with (
        tempfile.TemporaryDirectory(prefix="ray-") as sessions,  # paths of sockets are short
        Servers(tmp_path_factory.mktemp("ray")) as fleet,
    ):
        command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block", *flags.split()]
        head = fleet.start("ray", port, [*command, "--temp-dir", sessions], environment)
        wait_for(lambda: "Ray runtime started" in head.log.read_text(), seconds=120)
        yield {**environment, "RAY_ADDRESS": f"127.0.0.1:{port}", **dict([SHOWN.split("=")])}


@pytest.mark.parametrize("executor", ["1", "0"], ids=["newer", "older"])
def test_workers_of_a_batch_job_know_the_settings_and_write_states_that_are_found(
    cluster: Mapping[str, str], model: Path, executor: str
):
    """On vLLM's two executors; 0.33 has the newer one alone. Nothing collects reports there."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.harness.ray_workers", str(model)],
        env={**os.environ, **cluster, "VLLM_USE_RAY_V2_EXECUTOR_BACKEND": executor},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    (told,) = re.findall(rf"\(RayWorker\w+ pid=\d+\).*{re.escape(SETTINGS)}(.*)", done.stdout + done.stderr)
    assert SHOWN in told
    assert f"{FOUND} 160" in done.stdout.splitlines()
