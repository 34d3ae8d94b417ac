"""`seamark worker MODEL --flag-of-vllm`: `vllm serve`, with the patches and the flags they need.

The command becomes vLLM: the same process, the same exit status, and vLLM's own parser for all flags but seven.
"""

from __future__ import annotations

import argparse
import errno
import importlib
import importlib.util
import json
import logging
import os
import re
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

from engine_patches import families, settings
from engine_patches.commands.model_layers import NO_DRAFTS_ON_A_CPU, first_line, is_hybrid
from engine_patches.commands.patches import built_for, installed
from engine_patches.kv_connectors import ALL, DEFAULT_BYTES, USED, ConnectorLane, decide_by, needs_a_gpu, transfer_flags
from engine_patches.ledger import Platform
from engine_patches.settings import FULL, IMAGE, LOOPBACK, MODE_VARIABLE, OFF, REFERENCE, SUPPORTED, read_config

INSTALL = (
    f'run it in the environment that vLLM is installed in ("pip install vllm", {SUPPORTED}), after '
    '"pip install --no-deps /path/to/seamark" there; '
    "without a GPU, ./set-up.sh in Seamark's source makes a .venv with vLLM's CPU build"
)

# Flags without which hits stay invisible (prompt-tokens-details) or the gateway cannot ask for tokens (scale-out).
NEEDED_FLAGS: Mapping[str, str | None] = {
    "--enable-prefix-caching": None,
    "--enable-prompt-tokens-details": None,
    "--enable-scale-out": None,
    # The gateway reads these again and again.
    "--disable-access-log-for-endpoints": "/seamark/outcomes,/seamark/metrics",
}

# What reports at the server's own address, and what only HTTP's messages carry. vLLM takes the flag more than once; its
# frontend in Rust takes none, and there reports are read at an address of their own.
MIDDLEWARE = ("--middleware", "engine_patches.reporting.events_api.EventsEndpoint")

DEFAULT_PORT = "8000"  # vLLM's

# Each begins a flag of vLLM that configures drafts.
DRAFT_FLAGS = ("speculative-config", "sc", "spec-method", "spec-model", "spec-tokens")

DEFECTS_ON_A_CPU = (
    f"{MODE_VARIABLE}={OFF} leaves vLLM's own defects on a CPU: a prompt longer than a cache block can end the engine; "
    f"{MODE_VARIABLE}={REFERENCE} cures them and does no more"
)

# Mamba2 on CPU is exact in float32, and compiling for a CPU costs minutes.
CPU_FLAGS: Mapping[str, str | None] = {"--dtype": "float32", "--enforce-eager": None}

# The CPU kernels of gated delta nets compute in bfloat16 only. Their state may be wider: if vLLM chooses its width, the
# width, and with it the block size, depends on the CPU.
CPU_GDN_FLAGS: Mapping[str, str | None] = {**CPU_FLAGS, "--dtype": "bfloat16", "--mamba-ssm-cache-dtype": "float32"}

# Without the last, a few helpers of the sampler are compiled in eager mode too: a C++ compiler and 20 seconds.
CPU_ENVIRONMENT = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "TORCH_COMPILE_DISABLE": "1"}


def cpu_flags(model_type: str) -> Mapping[str, str | None]:
    return CPU_GDN_FLAGS if families.GDN in families.kinds_in({"model_type": model_type}) else CPU_FLAGS


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


class CommandLine(NamedTuple):
    model: str | None  # folder or name; None if only the file of vLLM's `--config` names it
    flags: list[str]  # of vLLM, as given
    config: Mapping[str, Any]  # what that file says
    explain: str | None  # "here", "gpu", or None to start a server
    gpu_memory: int | None = None  # bytes, to explain what is not run here


def read_command_line(argv: Sequence[str]) -> CommandLine:
    """Take `argv` apart. Flags that are not Seamark's are vLLM's, with or without a `--` before them.

    Exits with status 2, as argparse does, if no model is named.
    """
    parser = argparse.ArgumentParser(
        prog="seamark worker",
        usage="seamark worker MODEL [--explain [gpu] [--gpu-memory SIZE]] [any flag of `vllm serve`]",
        description="`vllm serve MODEL` with Seamark's patches and the flags they need.",
        epilog="`--help=all` lists vLLM's flags, which win over those that are set here: "
        f"{' '.join(NEEDED_FLAGS)} {MIDDLEWARE[0]}. Variables of the environment: SEAMARK_ENGINE=0 leaves vLLM "
        "untouched, =reference cures its defects and no more; SEAMARK_FAN_OUT=0: no request waits for another one's "
        "prefix; SEAMARK_STATE_SHARE=0.5: part of the cache's blocks that states may hold; SEAMARK_PIN_SHARE=0.1: "
        "part that pinned prompts may hold; SEAMARK_HINTS_FROM: networks whose header x-seamark-boundaries is read; "
        "SEAMARK_REPORTS_AT=HOST:PORT: where gateways read what engines report, if not by the middleware; "
        "SEAMARK_CHUNK_ENDS=1: states only at the ends of a kernel's chunks; SEAMARK_DRAFTS=1 or =0: hints beside "
        "drafts at once, or never, and not once a trial has shown them to be right; SEAMARK_KV_EVENTS=blocks: KV "
        "events name whole cache blocks, =0: all that vLLM announces.",
        allow_abbrev=False,
    )
    parser.add_argument("--model", metavar="MODEL", help="folder or name; or first, or `model` in vLLM's --config FILE")
    parser.add_argument("--host", help=f"address to listen at ({LOOPBACK}; 0.0.0.0 for other machines and containers)")
    parser.add_argument("--port", help="port to listen at (8000)")
    parser.add_argument(
        "--explain",
        nargs="?",
        metavar="gpu",
        const="here",
        help="say what the model's states cost in memory, and start nothing; `gpu`: as on a GPU, on a machine without",
    )
    memory = "memory of a GPU, as 96GiB, for --explain where it is not the one here"
    parser.add_argument("--gpu-memory", metavar="SIZE", type=size, help=memory)
    parser.add_argument("--checkpoint-dir", metavar="DIR", help="directory that keeps states over restarts; none: none")
    parser.add_argument(
        "--checkpoint-bytes", metavar="N", type=int, default=DEFAULT_BYTES, help="of all files in it (%(default)s)"
    )
    parser.add_argument(
        "--checkpoint-keep",
        choices=(USED, ALL),
        default=USED,
        help="states to keep in it: those that a request came back to and pinned ones, or each as soon as it is there",
    )
    given = list(argv)
    if any(argument.startswith("--help=") for argument in given):
        return CommandLine(None, given, {}, None)
    split = given.index("--") if "--" in given else len(given)
    args, flags = parser.parse_known_args(given[:split])
    explain: str | None = args.explain
    if explain not in (None, "here", "gpu"):  # a flag whose value may be left out takes the model for it
        flags.insert(0, explain)
        explain = "here"
    if args.gpu_memory and explain is None:
        parser.error("--gpu-memory goes with --explain; what vLLM takes of a GPU is --gpu-memory-utilization")
    explain = "gpu" if args.gpu_memory else explain
    flags += given[split + 1 :]
    model: str | None = args.model
    if model is None and flags and not flags[0].startswith("-"):
        model = flags.pop(0)
    for name in ("host", "port"):
        if getattr(args, name) is not None:
            flags += [f"--{name}", getattr(args, name)]
    if args.checkpoint_dir is not None:
        if transfer_config(flags_of(flags)):
            parser.error("--checkpoint-dir is a KV connector of its own: leave --kv-transfer-config away")
        flags += transfer_flags(os.path.abspath(args.checkpoint_dir), args.checkpoint_bytes, args.checkpoint_keep)
    config: Mapping[str, Any] = {}
    if "--config" in flags[:-1]:  # `--config=FILE` is no spelling vLLM knows
        file = flags[flags.index("--config") + 1]
        try:
            config = read_config(Path(file))
        except ValueError as error:
            parser.error(f"--config {file}: {error}")
    name = model or config.get("model", "")
    if str(name).startswith(("/", "./", "../")) and not Path(name).exists():
        parser.error(f"there is no {name}")
    if not name:
        parser.error("no model is named: seamark worker MODEL --flags-of-vllm (the model first, as in `vllm serve`)")
    return CommandLine(model, flags, config, explain, args.gpu_memory)


def size(text: str) -> int:
    """Bytes, of a number with a unit. Raises `ArgumentTypeError`."""
    found = re.fullmatch(r"(\d{1,6}(?:\.\d{1,3})?) ?([MGT])(i?)B?", text.strip(), re.ASCII | re.IGNORECASE)
    if found is None:
        raise argparse.ArgumentTypeError(f"{text!r} is no size: give a number and a unit, as 96GiB or 128GB")
    power = "MGT".index(found[2].upper()) + 2
    return int(float(found[1]) * (1024 if found[3] else 1000) ** power)


def flags_of(given: Sequence[str], config: Mapping[str, Any] = {}) -> dict[str, Any]:
    """What vLLM is given by flag, without leading dashes, and with dashes in the name but not in that of a field.

    `given`: on the command line, where the last of several counts; `config`: in the file of `--config`, which counts
    less. The value of a switch is whatever follows it.
    """
    flags = {name.replace("_", "-"): value for name, value in config.items()}
    for argument, following in zip(given, [*given[1:], ""], strict=False):
        if argument.startswith("-"):
            name, equals, value = argument.partition("=")
            head, dot, field = name.lstrip("-").partition(".")
            flags[head.replace("_", "-") + dot + field] = value if equals else following
    return flags


def vllm_arguments(
    model: str | None,
    given: Sequence[str],
    config: Mapping[str, Any] = {},
    for_cpu: Mapping[str, str | None] = {},
    lacking: Collection[str] = (),
) -> list[str]:
    """The arguments of `vllm serve`. A flag that the user gave, in `given` or in `config`, is never given twice.

    `model`: folder or name; None if the file of vLLM's `--config` names it. `config`: what that file says. `lacking`:
    flags that this vLLM does not have.
    """
    taken = flags_of(given, config)
    arguments = [] if model is None else [model]
    # vLLM alone listens to everybody.
    defaults: dict[str, str | None] = {"--host": LOOPBACK, **NEEDED_FLAGS, **for_cpu}
    for flag, value in defaults.items():
        if flag not in lacking and flag[2:] not in taken and f"no-{flag[2:]}" not in taken:
            arguments += [flag] if value is None else [flag, value]
    return [*arguments, *(() if settings.rust_frontend() else MIDDLEWARE), *given]


def flags_lacking(flags: Iterable[str]) -> list[str]:
    """Those of `flags` that the installed vLLM does not know, by the text of the modules that define its flags."""
    spec = importlib.util.find_spec("vllm")
    roots = [Path(place) for place in (spec.submodule_search_locations or ())] if spec is not None else []
    files = [root / "engine" / "arg_utils.py" for root in roots]
    files += [file for root in roots for file in root.glob("entrypoints/**/cli_args.py")]
    texts = [file.read_text() for file in files if file.is_file()]
    return [flag for flag in flags if texts and not any(flag[2:].replace("-", "_") in text for text in texts)]


def refusal(model: str, flags: Mapping[str, Any], *, on_cpu: bool = False) -> str | None:
    """Why vLLM could not serve a model with the KV connector of a command line, in one sentence; None if it could.

    vLLM's own words for that, half a minute later, name neither.
    """
    transfer = transfer_config(flags)
    if on_cpu and (name := needs_a_gpu(transfer)):
        return f"{name} needs a GPU in vLLM; on a CPU --checkpoint-dir keeps states"
    decision = decide_by(transfer)
    if decision.lane is not ConnectorLane.NOT_SERVED:
        return None
    served = "through NixlConnector and, on a GPU, OffloadingConnector it can"
    return f"{decision.reason}; {served}" if is_hybrid(config_of(model)) else None


def drafts(flags: Mapping[str, Any]) -> bool:
    return any(name.partition(".")[0] in DRAFT_FLAGS for name in flags)


def transfer_config(flags: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of vLLM's `KVTransferConfig` that flags name; what is malformed is left to vLLM."""
    transfer = flags.get("kv-transfer-config") or {}
    if isinstance(transfer, str):
        try:
            transfer = json.loads(transfer)
        except ValueError:
            transfer = {}
    fields = dict(transfer) if isinstance(transfer, Mapping) else {}
    start = "kv-transfer-config."
    fields |= {name.removeprefix(start): value for name, value in flags.items() if name.startswith(start)}
    if flags.get("kv-offloading-size"):  # as vLLM does
        on_lmcache = flags.get("kv-offloading-backend") == "lmcache"
        fields["kv_connector"] = "LMCacheMPConnector" if on_lmcache else "OffloadingConnector"
    return fields


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
    if (version := installed()) is None:
        raise ModuleNotFoundError("No module named 'vllm'", name="vLLM")
    if importlib.util.find_spec("torch") is None:
        raise ModuleNotFoundError("No module named 'torch'", name="torch")
    return built_for(version) is Platform.CPU


def main(argv: list[str]) -> int:
    try:
        model, given, config, explain, gpu_memory = read_command_line(argv)
        on_cpu = is_cpu_build() and explain != "gpu"
    except ModuleNotFoundError as error:
        return _fail(f"{error.name} is not installed here: {INSTALL}")
    os.environ.update(vllm_environment(os.environ, on_cpu))
    name = str(model or config.get("model") or "")
    of_model = config_of(name) if on_cpu and name else {}
    flags = flags_of(given, config)
    why = refusal(name, flags, on_cpu=on_cpu)
    if why is None and is_hybrid(of_model) and not explain:
        if drafts(flags):
            why = NO_DRAFTS_ON_A_CPU
        elif os.environ.get(MODE_VARIABLE, FULL).strip() == OFF and "no-enable-prefix-caching" not in flags:
            _say(DEFECTS_ON_A_CPU)
    if why:
        return _fail(why)
    for_cpu = cpu_flags(str(of_model.get("model_type", ""))) if on_cpu else {}
    lacking = flags_lacking((*NEEDED_FLAGS, *for_cpu))
    if lacking:
        needed = f"Seamark's hints need vLLM {SUPPORTED}, for one the image {IMAGE}"
        _say(f"the vLLM installed here has no {', '.join(lacking)}, left away; {needed}")
    arguments = vllm_arguments(model, given, config, for_cpu, lacking)
    if explain:
        from engine_patches.commands import explain as explaining

        return explaining.main(arguments, explain, gpu_memory)
    return serve(arguments, str(flags.get("port", DEFAULT_PORT)))


def serve(arguments: Sequence[str], port: str) -> int:
    """Be `vllm serve` with these arguments, inside this process, until it ends. Raises `SystemExit` as it does.

    `port`: where it will listen.

    It does not become the main module: the engine's processes import that one again, and ours is light, while a
    server's takes ten seconds.
    """
    renamed = not any(metadata.distributions(name="vllm"))
    if renamed:  # a CPU build; there is no Triton for a CPU, and torch's warning of that would be the first line
        logging.getLogger("torch._library.triton").setLevel(logging.ERROR)
    try:
        cli: Any = importlib.import_module("vllm.entrypoints.cli.main")
        importlib.import_module("vllm.entrypoints.cli.serve")  # the other one imports it only when it runs
    except (ImportError, OSError) as error:
        where = '"python3 -m vllm.entrypoints.cli.serve" shows where'
        return _fail(f"the vLLM installed here cannot be imported: {error}; {where}")
    if renamed:  # vLLM's command fails when it looks for the version that it could print
        version = metadata.version("vllm-cpu")
        cli.importlib = SimpleNamespace(metadata=SimpleNamespace(version=lambda _: version))
    sys.argv = ["vllm", "serve", *arguments]
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        cli.main()
    except (HfHubHTTPError, LocalEntryNotFoundError) as error:
        return _fail(f"the model is neither here nor to be had: {first_line(error)}")
    except OSError as error:  # an address that is taken, a file that cannot be read
        return _fail(why_taken(port) if error.errno == errno.EADDRINUSE else first_line(error))
    return 0


def _fail(why: str) -> int:
    _say(why)
    return 1


def _say(text: str) -> None:
    print(f"seamark worker: {text}", file=sys.stderr)


def why_taken(port: str) -> str:
    """Why nothing can listen at a port that is in use, in one sentence."""
    psutil: Any = importlib.import_module("psutil")  # vLLM brings it
    holder = "another process"
    try:
        for each in psutil.net_connections("tcp"):
            if each.status == psutil.CONN_LISTEN and str(each.laddr.port) == port and each.pid:
                holder = f"process {each.pid} ({psutil.Process(each.pid).name()})"
    except psutil.Error:
        pass
    return f"port {port} is held by {holder}; --port N takes another"
