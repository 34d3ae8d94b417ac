"""An engine beside a KV connector in a process of its own: it goes on stepping while nobody asks, and transfers go on.

Run as `python -m tests.harness.transfer_engine MODEL KV_TRANSFER_CONFIG`, the latter as vLLM's flag has it; one JSON
object a line in, one out. In the same process as its scheduler and its worker, so that passes can be counted and
defects planted.
"""

from __future__ import annotations

import importlib.util
import json
import os
import random
import select
import subprocess
import sys
from pathlib import Path
from typing import Any

from proxy.bench.harness.prompts import prose
from proxy.bench.harness.servers import CACHE
from proxy.commands.render_server import free_port
from tests.harness.engines import CPU_PROCESS

NIXL = "1.5.1"

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    **CPU_PROCESS,
    "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
}

PREFILL = {"do_remote_decode": True, "do_remote_prefill": False, "seamark_stops": True}

PRODUCER, CONSUMER, BOTH = "kv_producer", "kv_consumer", "kv_both"

Chat = list[dict[str, str]]

Prompt = dict[str, Any]


def nixl_transfer(role: str, name: str = "NixlConnector") -> dict[str, Any]:
    """vLLM's `kv_transfer_config` for NIXL on a CPU; what it cannot load is computed."""
    connector = {"kv_connector": name, "kv_role": role, "kv_buffer_device": "cpu"}
    return connector | {"kv_load_failure_policy": "recompute"}


def two_round_chats(count: int = 20, seed: int = 11) -> tuple[list[Chat], list[Chat]]:
    """The first turns of chats on five system prompts, and the second ones."""
    draw = random.Random(seed)
    systems = [prose(words, seed + number) for number, words in enumerate((20, 70, 150, 400, 700))]
    first: list[Chat] = []
    second: list[Chat] = []
    for number in range(count):
        user = f"{draw.choice('ABCDEFGH')}{number}: {prose(draw.choice((4, 15, 60, 200)), seed + number)}"
        chat = [{"role": "system", "content": systems[number % 5]}, {"role": "user", "content": user}]
        first.append(chat)
        said = prose(draw.randint(3, 80), seed + 500 + number)
        more = f"{number} again: {prose(draw.choice((4, 15, 60)), seed + 900 + number)}"
        second.append([*chat, {"role": "assistant", "content": said}, {"role": "user", "content": more}])
    return first, second


def prompts_of(tokenizer: Any, chats: list[Chat]) -> list[Prompt]:
    """Their tokens, hinted as the gateway does: behind the system prompt, and so many tokens before the end."""

    def ids(chat: Chat, ask: bool = True) -> list[int]:
        found = tokenizer.apply_chat_template(chat, add_generation_prompt=ask, tokenize=True)
        return list(found["input_ids"] if hasattr(found, "keys") else found)

    prompts = []
    for chat in chats:
        whole, turn = ids(chat), ids(chat, ask=False)
        other = ids([chat[0], {"role": "user", "content": "@@@"}])
        head = next(n for n, (a, b) in enumerate(zip(whole, other, strict=False)) if a != b)
        prompts.append({"ids": whole, "hint": [head, len(turn) - len(whole)]})
    return prompts


def differing(answers: list[Any], right: list[Any]) -> list[int]:
    """Numbers of the answers with another token, or a log-probability further off than 1e-4."""
    found = []
    for number, (answer, other) in enumerate(zip(answers, right, strict=True)):
        pairs = zip(answer["tops"], other["tops"], strict=True)
        offs = (abs(one[token] - two[token]) for one, two in pairs for token in one.keys() & two.keys())
        off = max(offs, default=0.0)  # a first token of another answer may have no rival in common
        if answer["tokens"] != other["tokens"] or off > 1e-4:
            found.append(number)
    return found


def cached(answers: list[Any]) -> int:
    """Tokens."""
    return sum(answer["cached"] for answer in answers)


def nixl() -> str:
    """Folder with NIXL (70 MB to fetch once, 240 MB), which the lock does not hold: only these tests need it."""
    folder = (CACHE / f"nixl-{NIXL}").resolve()
    if not folder.exists():
        if importlib.util.find_spec("nixl") is not None:
            return ""
        making = folder.with_name(f"{folder.name}.{os.getpid()}")
        names = (f"nixl=={NIXL}", f"nixl-cu12=={NIXL}")
        subprocess.run(
            [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", making, *names], check=True
        )
        making.rename(folder)
    return str(folder)


class TransferEngine:
    """One such engine, seen from outside. Use as a context manager."""

    def __init__(self, folder: Path, model: Path, transfer: dict[str, Any], name: str = "") -> None:
        """Its log goes into `folder`, under `name` or its role. Returns before it is ready."""
        self.log = folder / f"{name or transfer['kv_role']}.log"
        path = os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), nixl())))
        settings = ENVIRONMENT | {"PYTHONPATH": path, "VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port())}
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tests.harness.transfer_engine", str(model), json.dumps(transfer)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=os.environ | settings,
            )

    def __enter__(self) -> TransferEngine:
        return self

    def __exit__(self, *exception: object) -> None:
        self.process.kill()
        self.process.wait()

    def call(self, name: str, **arguments: Any) -> Any:
        """What the engine's `name` returns. Raises `RuntimeError` with the log's end if it fails."""
        assert self.process.stdin and self.process.stdout
        line = b""
        try:
            self.process.stdin.write(json.dumps([name, arguments]).encode() + b"\n")
            self.process.stdin.flush()
            line = self.process.stdout.readline()
        except BrokenPipeError:
            pass
        if not line:
            raise RuntimeError(self.log.read_text(errors="replace")[-4000:])
        return json.loads(line)


class _Engine:
    """The engine itself."""

    def __init__(self, model: str, transfer: dict[str, Any]) -> None:
        from vllm import LLM

        self.llm = LLM(
            model=model,
            dtype="float32",
            enforce_eager=True,
            max_model_len=8192,
            max_num_seqs=8,
            kv_transfer_config=transfer or None,
        )
        core = self.llm.llm_engine.engine_core.engine_core
        self.scheduler, self.executor = core.scheduler, core.model_executor
        self.passes = 0
        execute = self.executor.execute_model

        def counted(output: Any, *args: Any, **kwargs: Any) -> Any:
            self.passes += output.total_num_scheduled_tokens > 0
            return execute(output, *args, **kwargs)

        self.executor.execute_model = counted

    def step(self) -> None:
        self.llm.llm_engine.step()

    def ask(self, prompts: list[dict[str, Any]], tokens: int = 32, wave: int = 4) -> list[dict[str, Any]]:
        """Greedy answers. A prompt has `ids`, and may have `hint`, `salt`, `transfer` and `anew` (no cache is read)."""
        from vllm import SamplingParams

        answers = []
        for start in range(0, len(prompts), wave):
            asked = prompts[start : start + wave]
            sampling = []
            for prompt in asked:
                extra = {"seamark_boundaries": prompt.get("hint"), "kv_transfer_params": prompt.get("transfer")}
                sampling.append(
                    SamplingParams(
                        temperature=0,
                        max_tokens=tokens,
                        ignore_eos=True,
                        logprobs=5,
                        detokenize=False,
                        skip_reading_prefix_cache=True if prompt.get("anew") else None,
                        extra_args={name: value for name, value in extra.items() if value} or None,
                    )
                )
            inputs = [
                {"prompt_token_ids": prompt["ids"]} | ({"cache_salt": prompt["salt"]} if prompt.get("salt") else {})
                for prompt in asked
            ]
            for done in self.llm.generate(inputs, sampling, use_tqdm=False):
                (said,) = done.outputs
                tops = [{str(token): each.logprob for token, each in step.items()} for step in said.logprobs]
                answers.append(
                    {
                        "tokens": list(said.token_ids),
                        "tops": tops,
                        "cached": done.num_cached_tokens or 0,
                        "transfer": done.kv_transfer_params,
                    }
                )
        return answers

    def abort_before_it_is_scheduled(self, prompt: dict[str, Any]) -> None:
        """A client that leaves while its request waits."""
        from vllm import SamplingParams

        sampling = SamplingParams(max_tokens=4, extra_args={"kv_transfer_params": prompt["transfer"]})
        name = self.llm.llm_engine.add_request("gone", {"prompt_token_ids": prompt["ids"]}, sampling)
        self.llm.llm_engine.abort_request([name or "gone"])

    def taken_passes(self) -> int:
        """Passes since the last call."""
        passes, self.passes = self.passes, 0
        return passes

    def requests(self) -> int:
        """Requests that are not over, or whose blocks are lent."""
        return len(self.scheduler.requests)

    def lease(self, seconds: float) -> None:
        """Blocks of the prefills from now on are lent for so long."""
        self.scheduler.connector.connector_scheduler._kv_lease_duration = seconds

    def overwrite(self) -> bool:
        """All blocks get other contents, as if they had other owners by now; whether all were free."""
        emptied = self.scheduler.reset_prefix_cache()
        for cache in self.executor.driver_worker.worker.model_runner.kv_caches:
            for tensor in cache if isinstance(cache, list | tuple) else [cache]:
                tensor.fill_(0.5)
        return bool(emptied)

    def plant(self, defect: str) -> None:
        """Take a check out: "content" or "deadline"; "" puts both back."""
        from vllm.distributed.kv_transfer.kv_connector.v1.nixl.pull_worker import NixlPullConnectorWorker

        from engine_patches.scheduler.transfers import Transfers

        if not hasattr(self, "whole"):
            self.whole = Transfers._refusal, NixlPullConnectorWorker._is_turn2_read_expired
        Transfers._refusal, NixlPullConnectorWorker._is_turn2_read_expired = self.whole
        if defect == "content":
            Transfers._refusal = lambda *_: ""
        elif defect == "deadline":
            NixlPullConnectorWorker._is_turn2_read_expired = lambda *_: False

    def says(self) -> dict[str, Any]:
        """What the plugin is set to, and has counted since the last call."""
        checkpoints = self.scheduler.seamark
        counts = checkpoints.counters.take()
        return {"inside_pass": checkpoints.writes_in_forward, "written": dict(counts.written)}


def main(model: str, transfer: str) -> None:
    """Serve until the input ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # vLLM prints
    engine = _Engine(model, json.loads(transfer))
    while True:
        while not select.select([sys.stdin], [], [], 0.01)[0]:
            engine.step()  # transfers go on, and leases end
        line = sys.stdin.readline()
        if not line:
            return
        name, arguments = json.loads(line)
        print(json.dumps(getattr(engine, name)(**arguments)), file=answers, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:3])
