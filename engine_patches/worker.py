"""`seamark worker`: a vLLM server with the patches and the flags they need. It becomes vLLM: same process and exit."""

from __future__ import annotations

import argparse
import os
import runpy
import sys
from collections.abc import Mapping, Sequence
from importlib import metadata

SERVER = "vllm.entrypoints.openai.api_server"

# Flags without which hits stay invisible (prompt-tokens-details) or the gateway cannot ask for tokens (scale-out).
NEEDED_FLAGS: Mapping[str, str | None] = {
    "--enable-prefix-caching": None,
    "--enable-prompt-tokens-details": None,
    "--enable-scale-out": None,
}
# Mamba2 on CPU is exact in float32, and compiling for a CPU costs minutes.
CPU_FLAGS: Mapping[str, str | None] = {"--dtype": "float32", "--enforce-eager": None}
# Eager means eager: a few helpers of the sampler would still be compiled, which wants a C++ compiler and 20 seconds.
CPU_ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "TORCH_COMPILE_DISABLE": "1",
}


def vllm_arguments(model: str, host: str, port: int, extra: Sequence[str], on_cpu: bool) -> list[str]:
    """The command line of vLLM's OpenAI server. What the user gave in `extra` is never given twice."""
    given = {argument.split("=", 1)[0] for argument in extra if argument.startswith("--")}
    defaults = {**NEEDED_FLAGS, **(CPU_FLAGS if on_cpu else {})}
    arguments = ["--model", model, "--host", host, "--port", str(port)]
    for flag, value in defaults.items():
        negation = flag.replace("--", "--no-", 1)
        if flag not in given and negation not in given:
            arguments += [flag] if value is None else [flag, value]
    return arguments + list(extra)


def vllm_environment(environment: Mapping[str, str], on_cpu: bool) -> dict[str, str]:
    """Environment of the server: CPU defaults where unset, and our plugin among those a user admits."""
    wanted = {**(CPU_ENVIRONMENT if on_cpu else {}), **environment}
    admitted = wanted.get("VLLM_PLUGINS")
    if admitted is not None and "seamark" not in admitted.split(","):
        wanted["VLLM_PLUGINS"] = f"{admitted},seamark".strip(",")
    return wanted


def is_cpu_build() -> bool:
    """Whether the installed vLLM is a CPU build, by its name and version alone: importing it takes seconds.

    Raises `PackageNotFoundError` where there is none.
    """
    try:
        return "cpu" in metadata.version("vllm")
    except metadata.PackageNotFoundError:
        metadata.version("vllm-cpu")
        return True


def main(argv: list[str]) -> int:
    own, extra = argv, []
    if "--" in argv:
        split = argv.index("--")
        own, extra = argv[:split], argv[split + 1 :]
    parser = argparse.ArgumentParser(
        prog="seamark worker",
        description="start a vLLM server with Seamark's patches",
        epilog="everything after -- goes to vLLM",
    )
    parser.add_argument("--model", required=True, help="model folder or name")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--host", default="127.0.0.1")
    args = parser.parse_args(own)
    try:
        on_cpu = is_cpu_build()
    except metadata.PackageNotFoundError:
        print("seamark worker: vLLM is not installed here (for a CPU: pip install 'seamark[cpu]')", file=sys.stderr)
        return 1
    os.environ.update(vllm_environment(os.environ, on_cpu))
    sys.argv = [SERVER, *vllm_arguments(args.model, args.host, args.port, extra, on_cpu)]
    # Run inside this process and not as its main module: the engine's processes import the main module again, and
    # ours is light where the server's takes ten seconds.
    runpy.run_module(SERVER, run_name="__main__")
    return 0
