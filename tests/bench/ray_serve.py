"""`python -m tests.bench.ray_serve`: the recipe of deploy/ray, with its router and without, on one replica and on two.

Ray comes from the package index, into .cache (some 600 MB); vLLM is the one that is installed. Exit status 1 if the
router does not bring nearly all that could be hit, or answers differ.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx

from proxy.bench.harness.servers import CACHE, NEMOTRON_H, generated_model, narrator
from proxy.boundaries.token_ids import common_prefix
from proxy.commands.render_server import free_port

PROJECT = Path(__file__).parents[2]

RECIPE = PROJECT / "deploy" / "ray"

NEEDS = ("ray[serve]==2.60.0", "jsonref", "typer", "pyarrow", "pandas", "fsspec")  # as deploy/README.md has it

SYSTEMS, QUESTIONS, UNIT = 4, 4, 16

SECONDS = 400.0

LEAST = 0.99  # of what could be hit


def installed(say: Callable[[str], None]) -> Path:
    """The folder with Ray, beside whose packages those of this environment stand."""
    folder = (CACHE / "ray-2.60.0").absolute()
    if not folder.exists():
        say(f"installing {NEEDS[0]} in {folder}")
        partial = Path(tempfile.mkdtemp(dir=CACHE, prefix="ray-"))
        with tempfile.NamedTemporaryFile("w", suffix=".txt") as constraints:
            lock = (PROJECT / "requirements.lock").read_text().splitlines()
            constraints.write("\n".join(line for line in lock if "+cpu" not in line))
            constraints.flush()
            pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
            subprocess.run([*pip, "--target", str(partial), "-c", constraints.name, *NEEDS], check=True)
        partial.rename(folder)
    return folder


def chats() -> list[list[dict[str, str]]]:
    """Questions on a few system prompts, in turns."""
    systems = [
        f"harbour {number}: " + " ".join(f"rule {number} {i} keep the light." for i in range(60))
        for number in range(SYSTEMS)
    ]
    return [
        [{"role": "system", "content": system}, {"role": "user", "content": f"question {question} of {number}?"}]
        for question in range(QUESTIONS)
        for number, system in enumerate(systems)
    ]


def inside(model: str, router: bool, replicas: int) -> dict[str, Any]:
    """In a process that has Ray: start the recipe, and ask. Returns cached tokens and answers, in the chats' order."""
    import ray
    from ray import serve

    sys.path.insert(0, str(RECIPE))
    import app  # type: ignore[import-not-found]

    environment = {name: value for name, value in os.environ.items() if name in ("PYTHONPATH", "SEAMARK_RAY_CPU")}
    ray.init(
        num_cpus=8,
        object_store_memory=150 * 2**20,
        include_dashboard=False,
        _node_ip_address="127.0.0.1",
        log_to_driver=False,
        runtime_env={"env_vars": environment},
    )
    port = free_port()
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    built = app.build({"model": model, "name": "tiny", "router": str(router).lower(), "replicas": replicas})
    serve.run(built, name="llm", blocking=False)
    cached, answers = [], []
    for messages in chats():
        body = {"model": "tiny", "messages": messages, "max_tokens": 8, "temperature": 0}
        told = httpx.post(f"http://127.0.0.1:{port}/v1/chat/completions", json=body, timeout=120).raise_for_status()
        usage = told.json()["usage"]
        cached.append((usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0)
        answers.append(told.json()["choices"][0]["message"]["content"])
    serve.shutdown()
    ray.shutdown()
    return {"cached": cached, "answers": answers}


def main(argv: list[str], say: Callable[[str], None] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.ray_serve", description="Seamark in Ray Serve LLM")
    parser.add_argument("--inside", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.inside:
        model, router, replicas = args.inside
        print(json.dumps(inside(model, router == "router", int(replicas))))
        return 0
    say = say or narrator()
    model, folder = generated_model(say, NEMOTRON_H).absolute(), installed(say)
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    asked = [tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False) for chat in chats()]
    possible = sum(
        max(common_prefix(ids, other) for other in asked[:number]) // UNIT * UNIT
        for number, ids in enumerate(asked)
        if number >= SYSTEMS
    )
    environment = os.environ | {
        "PYTHONPATH": f"{PROJECT}:{RECIPE}:{folder}",
        "HF_HUB_OFFLINE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1",
        "SEAMARK_RAY_CPU": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
    }
    print(f"{'replicas':>8}  {'router':<8}{'hits':>8}", flush=True)
    answers, wrong = [], []
    for replicas in (1, 2):
        for router in ("none", "router"):
            command = [sys.executable, "-m", "tests.bench.ray_serve", "--inside", str(model), router, str(replicas)]
            done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, env=environment)
            if done.returncode:
                print(done.stderr[-3000:], file=sys.stderr)
                return 1
            told = json.loads(done.stdout.splitlines()[-1])
            share = sum(told["cached"][SYSTEMS:]) / possible
            answers.append(told["answers"])
            print(f"{replicas:>8}  {router:<8}{share:>8.3f}", flush=True)
            if router == "router" and share < LEAST:
                wrong.append(f"{replicas} replicas: {share:.3f} of what could be hit, not {LEAST}")
    if any(each != answers[0] for each in answers):
        wrong.append("answers differ")
    print("\nhits: tokens from a cache, of those that an earlier prompt had; all engines have the plugin")
    for each in wrong:
        print(f"NOT SO: {each}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
