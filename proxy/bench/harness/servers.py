"""Real servers for a benchmark or a test: vLLM engines and gateways on free loopback ports, all ended at the end."""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import importlib.util
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx

MODEL_NAME = "tiny-hybrid"
START_SECONDS, STOP_SECONDS = 420.0, 20.0

# One thread per engine: on a small machine more of them wait for each other. The executor inside the engine's process
# saves a process, and its imports, per engine.
ENGINE_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    # Else tensors of 32 MB, which one engine has in its passes and another just not, are page faults each time.
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": "4294967295",
}

ENGINE_FLAGS = (
    *("--served-model-name", MODEL_NAME, "--max-model-len", "8192", "--max-num-seqs", "8"),
    "--enable-logging-iteration-details",  # the only way to count forward passes of an engine that is not ours
)

CACHE = Path(".cache")

NO_ENGINE = (
    "seamark bench: it starts vLLM engines, and this environment has no vLLM. Run it in vLLM's, after "
    "pip install --no-deps /path/to/seamark there, or run ./set-up.sh in the source, which installs vLLM's CPU build."
)

NEMOTRON_H, QWEN3_NEXT = "nemotron_h", "qwen3_next"

# Match unit (tokens) that the plugin chooses: a delta net's kernels scan in chunks of 64.
MATCH_UNITS: Mapping[str, int] = {NEMOTRON_H: 16, QWEN3_NEXT: 64}


def free_port() -> int:
    """A loopback port that nothing listens on.

    It lies below those that Linux gives to connections, so that none of these takes it before a server binds it.
    """
    for port in random.sample(range(15_000, 32_000), 100):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise OSError("None of 100 loopback ports from 15000 to 31999 is free.")


class NotStarted(RuntimeError):
    """A server ended, or was not ready in time; the message has the end of its log."""


@dataclass
class Server:
    """A started server. `log` grows while it runs."""

    name: str
    url: str
    log: Path
    process: subprocess.Popen[bytes]

    def wait_until_ready(self, path: str = "/health", seconds: float = START_SECONDS) -> None:
        """Return once `path` answers 200. Raises `NotStarted` if it dies or takes too long."""
        deadline, said = time.monotonic() + seconds, "nothing"
        with httpx.Client(timeout=5.0, trust_env=False) as client:
            while time.monotonic() < deadline:
                if self.process.poll() is not None:
                    raise NotStarted(f"{self.name} ended with {self.process.returncode}:\n{self.log_end()}")
                try:
                    answer = client.get(self.url + path)
                except httpx.HTTPError as error:
                    said = str(error) or type(error).__name__
                else:
                    if answer.status_code == 200:
                        return
                    said = f"{answer.status_code} {answer.text[:500]}"
                time.sleep(0.1)
        raise NotStarted(f"{self.name} was not ready after {seconds:.0f} s; {path} answered {said}:\n{self.log_end()}")

    def log_end(self, lines: int = 40) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])

    def stop(self) -> None:
        if self.process.poll() is None:
            self.process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(STOP_SECONDS)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


class Servers:
    """Servers that end together, whatever happens. Use as a context manager."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.started: list[Server] = []

    def __enter__(self) -> Servers:
        return self

    def __exit__(self, *exception: object) -> None:
        interrupted = signal.signal(signal.SIGINT, signal.SIG_IGN)
        try:
            for server in self.started:
                if server.process.poll() is None:
                    server.process.terminate()
            for server in self.started:
                server.stop()
        finally:
            signal.signal(signal.SIGINT, interrupted)

    def engine(
        self,
        name: str,
        model: Path,
        mode: str = "1",
        flags: Sequence[str] = (),
        environment: Mapping[str, str] = {},
        port: int | None = None,
    ) -> Server:
        """Start a vLLM server with `SEAMARK_ENGINE=mode`, on a free port where none is given."""
        port = port or free_port()
        command = [sys.executable, "-m", "engine_patches", "worker", str(model), "--port", str(port)]
        settings = {**ENGINE_ENVIRONMENT, "SEAMARK_ENGINE": mode, **environment}
        return self.start(name, port, [*command, *ENGINE_FLAGS, *flags], settings)

    def gateway(self, *workers: Server, flags: Sequence[str] = ()) -> Server:
        """Start `seamark serve` in front of `workers`, without self-checks, which would be measured as well.

        No load balancer has to learn that it stops. Raises `ModuleNotFoundError` where the gateway cannot run: vLLM's
        environment has the plugin without the libraries of the gateway.
        """
        importlib.import_module("proxy.server.uvicorn_server")
        port = free_port()
        command = [sys.executable, "-m", "proxy.cli", "serve", "--port", str(port)]
        command += ["--self-check-interval", "0", "--stop-delay", "0", *flags]
        for worker in workers:
            command += ["--worker", worker.url]
        return self.start("gateway", port, command, {})

    def start(self, name: str, port: int, command: Sequence[str], environment: Mapping[str, str]) -> Server:
        """Start any server that `command` lets listen on the loopback `port`."""
        log = self._folder / f"{name}-{port}.log"
        own = {key: value for key, value in os.environ.items() if not key.startswith("SEAMARK_")} | dict(environment)
        with log.open("wb") as out:
            # In a process group of its own: vLLM's engine processes end with it.
            process = subprocess.Popen(
                list(command), stdin=subprocess.DEVNULL, stdout=out, stderr=out, env=own, start_new_session=True
            )
        server = Server(name, f"http://127.0.0.1:{port}", log, process)
        self.started.append(server)
        return server


def narrator() -> Callable[..., None]:
    """Prints lines to stderr with the seconds since this call. From here on `kill` ends all just as Ctrl-C does.

    Of the `passing` ones a terminal shows the last; nothing else shows them.
    """
    began, line = time.monotonic(), "\r\x1b[K" if sys.stderr.isatty() else ""
    signal.signal(signal.SIGTERM, signal.default_int_handler)

    def say(text: str, passing: bool = False) -> None:
        if line or not passing:
            end = "" if passing else "\n"
            print(f"{line}[{time.monotonic() - began:4.0f} s] {text}", file=sys.stderr, flush=True, end=end)

    return say


def generated_model(say: Callable[[str], None], family: str = NEMOTRON_H) -> Path:
    """The folder of the generated model of `family`, generated again whenever its generator has changed.

    Raises `SystemExit` if this environment has no vLLM.
    """
    source = importlib.util.find_spec("engine_patches.commands.model")
    if source is None or source.origin is None or importlib.util.find_spec("vllm") is None:
        raise SystemExit(NO_ENGINE)
    version = hashlib.sha256(Path(source.origin).read_bytes()).hexdigest()[:12]
    folder = CACHE / f"{family}-{version}"
    if not folder.exists():
        say(f"generating a small {family} in {folder}")
        CACHE.mkdir(exist_ok=True)
        # Others may want it at the same time: whoever is first gives it its name.
        with tempfile.TemporaryDirectory(dir=CACHE, prefix="model-") as being_made:
            model = ["model", "--endless", "--family", family, "--out", being_made + "/m"]
            command = [sys.executable, "-m", "engine_patches", *model]
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode:
                raise SystemExit(f"seamark bench: no model: {done.stderr.strip()}")
            with contextlib.suppress(OSError):
                Path(being_made, "m").rename(folder)
    return folder.resolve()
