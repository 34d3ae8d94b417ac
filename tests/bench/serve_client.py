"""`vllm bench serve` again and again in one process, so that its imports are not run beside what it measures.

Run as `python -m tests.bench.serve_client`: reads the arguments of a run as a JSON list from each line of its input and
writes its result as a JSON line. The `vllm` script of CPU builds fails: it looks for a distribution of another name.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from proxy.bench.harness.servers import MODEL_NAME
from proxy.chat.chat import CHAT


def arguments_of(url: str, model: Path, prompts: int, at_once: int, seed: int) -> list[str]:
    """What all runs have in common: greedy chats of full length, `at_once` at a time."""
    flags = {"--backend": "openai-chat", "--endpoint": CHAT, "--base-url": url, "--model": MODEL_NAME}
    flags |= {"--tokenizer": str(model), "--num-prompts": str(prompts), "--max-concurrency": str(at_once)}
    flags |= {"--seed": str(seed), "--temperature": "0"}
    return [*(part for pair in flags.items() for part in pair), "--ignore-eos", "--disable-tqdm", "--save-detailed"]


class ServeClient:
    """The process. Use as an async context manager."""

    async def __aenter__(self) -> ServeClient:
        pipe = subprocess.PIPE
        command = [sys.executable, "-m", __name__]
        quiet = {"HF_HUB_OFFLINE": "1", "SEAMARK_ENGINE": "0", "VLLM_LOGGING_LEVEL": "ERROR"}
        environment = {**os.environ, **quiet}
        self._process = await asyncio.create_subprocess_exec(
            *command, stdin=pipe, stdout=pipe, env=environment, limit=2**24
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._process.returncode is None:
            self._process.kill()
        await self._process.wait()

    async def run(self, arguments: Sequence[str]) -> list[float]:
        """One run: seconds to the first token of each request.

        Raises `RuntimeError` if the process ends or a request fails.
        """
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None and stdout is not None
        stdin.write(json.dumps(list(arguments)).encode() + b"\n")
        await stdin.drain()
        if not (line := await stdout.readline()):
            raise RuntimeError(f"vllm bench serve ended with {await self._process.wait()}")
        result: dict[str, Any] = json.loads(line)
        if result["failed"] or not result["completed"]:
            raise RuntimeError(f"vllm bench serve: {result['failed']} requests failed: {result.get('errors')}")
        return list(result["ttfts"])

    @property
    def pid(self) -> int:
        """Of the process."""
        return self._process.pid


def main() -> None:
    results = os.fdopen(os.dup(1), "w")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what it prints itself
    import vllm.platforms
    from vllm.benchmarks.serve import add_cli_args
    from vllm.benchmarks.serve import main as run
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    assert vllm.platforms.current_platform is not None  # resolved before anything asks for a device
    parser = FlexibleArgumentParser()
    add_cli_args(parser)
    for line in sys.stdin:
        result = run(parser.parse_args(json.loads(line)))
        kept = ("completed", "failed", "errors", "ttfts")
        print(json.dumps({name: result[name] for name in kept if name in result}), file=results, flush=True)


if __name__ == "__main__":
    main()
