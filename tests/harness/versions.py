"""The scheduler's situations and the audit on the Python source of other vLLMs.

Run as `python -m tests.harness.versions 0.33.0`.

Wheels come from the package index that pip is configured with (some 400 MB each, unpacked to their Python files under
.cache/). Nothing is compiled and no engine runs: scheduler, cache manager and patches are the real ones, the worker is
a model. Prints one line per version; exit 1 if anything is wrong.
"""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from proxy.bench.harness.servers import CACHE, generated_model
from tests.harness import draft_cores
from tests.harness.draft_heads import mtp_model
from tests.harness.situation_table import differences

ROOT = Path(__file__).parents[2]

NO_WINDOWS = "0.31.0"  # beside a draft head with a window hints are refused

TRITON, RAY, UV, NIXL = "3.9.0", "2.60.0", "0.13.9", "1.5.1"

RUST_FRONTEND = "vllm-rs"

NEEDED_BY_NEWER = ("orjson",)  # imported by a vLLM that is newer than requirements.lock, and not in there


def source_of(version: str) -> Path:
    """Folder with the Python files of a vLLM, its frontend in Rust if it has one, and metadata that makes it take a CPU
    for its platform.
    """
    folder = (CACHE / f"vllm-{version}").resolve()
    metadata = folder / f"vllm-{version}.dist-info" / "METADATA"
    if not metadata.exists():
        folder.mkdir(parents=True, exist_ok=True)
        fetch = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary", ":all:"]
        subprocess.run([*fetch, "--dest", str(folder), f"vllm=={version}"], check=True)
        (wheel,) = folder.glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            wanted = (".py", ".json", "/" + RUST_FRONTEND)
            archive.extractall(folder, [name for name in archive.namelist() if name.endswith(wanted)])
        wheel.unlink()
        if (frontend := folder / "vllm" / RUST_FRONTEND).exists():
            frontend.chmod(0o755)  # archives of Python forget it
        metadata.parent.mkdir(exist_ok=True)
        metadata.write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}+cpu\n")
    return folder


def engine_of(version: str) -> Path:
    """Folder with a vLLM that runs on a CPU: the Python files of `version`, the installed CPU build's compiled ones.

    An engine takes it if the folder is first on `PYTHONPATH`. An op that those lack is an error when called.
    """
    folder = (CACHE / f"vllm-{version}-cpu").resolve()
    if not folder.exists():
        source = source_of(version)
        (installed,) = importlib.util.find_spec("vllm").submodule_search_locations  # type: ignore[union-attr]
        with tempfile.TemporaryDirectory(dir=CACHE, prefix="vllm-") as incomplete:
            whole = Path(incomplete, "site")
            shutil.copytree(source, whole)
            for compiled in Path(installed).rglob("*.so*"):
                link = whole / "vllm" / compiled.relative_to(installed)
                link.parent.mkdir(parents=True, exist_ok=True)
                link.symlink_to(compiled)
            install = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--only-binary", ":all:"]
            subprocess.run([*install, "--target", str(whole), *NEEDED_BY_NEWER], check=True)
            with contextlib.suppress(OSError):  # another process was faster
                whole.rename(folder)
    return folder


def triton() -> Path:
    """Folder with Triton, for its interpreter: vLLM's CPU build comes without. Some 290 MB to fetch."""
    return _fetched("triton", TRITON)


def ray() -> Path:
    """Folder with Ray and what it needs besides vLLM's own libraries. Some 75 MB to fetch."""
    return _fetched("ray", RAY, "msgpack")


def nixl() -> Path:
    """Folder with NIXL. Some 70 MB to fetch."""
    return _fetched("nixl", NIXL, f"nixl-cu12=={NIXL}")


def uv() -> Path:
    """The program with which images of spark-vllm-docker install. Some 18 MB to fetch."""
    return _fetched("uv", UV) / "bin" / "uv"


def _fetched(name: str, version: str, *others: str) -> Path:
    """Folder with a package that tests need and the environment lacks, and `others`."""
    folder = (CACHE / f"{name}-{version}").resolve()
    if not folder.exists():
        CACHE.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory(dir=CACHE, prefix=f"{name}-") as incomplete:
            install = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--only-binary", ":all:"]
            wanted = [f"{name}=={version}", *others]
            fetched = subprocess.run(
                [*install, "--target", f"{incomplete}/site", *wanted], capture_output=True, text=True
            )
            if fetched.returncode:
                raise RuntimeError(
                    f"{' and '.join(wanted)}, which these tests need, could not be fetched. Give pip a package index "
                    f"that has them, or unpack their wheels into {folder}:\n{fetched.stderr[-2000:]}"
                )
            with contextlib.suppress(OSError):  # another process was faster
                Path(incomplete, "site").rename(folder)
    return folder


def interpreted(module: str, *arguments: str, source: Path | None = None, seconds: float = 900) -> Any:
    """The JSON that a module of the harness prints last, run with Triton's interpreter.

    `source`: folder with the vLLM that it runs on; None for the installed one.
    """
    extra = {
        "TRITON_INTERPRET": "1",
        "CUDA_VISIBLE_DEVICES": "",  # vLLM then admits a Triton without a driver
        "VLLM_TRITON_FORCE_FIRST_CONFIG": "1",  # a kernel is tuned on a device
        "OMP_NUM_THREADS": "1",
    }
    return _told([*filter(None, [source]), triton()], module, arguments, extra, seconds)


def run(source: Path, module: str, *arguments: str) -> Any:
    """The JSON that a module of the harness prints last, run on a vLLM's source."""
    extra = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "TORCH_COMPILE_DISABLE": "1"}
    return _told([source], module, arguments, extra, None)


def _told(
    paths: Sequence[Path], module: str, arguments: Sequence[str], extra: Mapping[str, str], seconds: float | None
) -> Any:
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(map(str, [*paths, ROOT])),
        "PYTHONDONTWRITEBYTECODE": "1",
        "VLLM_PLUGINS": "none",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "HF_HUB_OFFLINE": "1",
        **extra,
    }
    command = [sys.executable, "-m", f"tests.harness.{module}", *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=seconds)
    if done.returncode:
        raise RuntimeError(f"{module} on {paths[0].name} ended with {done.returncode}: {done.stderr[-4000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def main(versions: list[str]) -> int:
    model = str(generated_model(print))
    cut = {"writes_in_forward": False}  # chunks end at the states instead
    tight = {"blocks": 30, "running": 4}
    cores = [{}, tight, {"overlap": True}, cut, {**cut, "export": False}, {**tight, "kv_events": "units"}]
    indexed = {"index": 16}  # groups of an index, its ring and a convolution
    cores += [indexed, {**indexed, **cut}, {**indexed, "blocks": 60, "running": 4, "kv_events": "units"}]
    cores += [{"stages": 2}, {**tight, "stages": 2}, {**tight, "stages": 3, "overlap": True}]
    cores += [{"context_ranks": 2, "stages": 2}, {**tight, "context_ranks": 4}, {**cut, "context_ranks": 2}]
    cores += [{**tight, "context_ranks": 2, "kv_events": "units"}]
    drafting_model = str(mtp_model())
    wanted: dict[str, Any] = {"seeds": [1], "chats": 40, "answers": draft_cores.ANSWERS, "shared": draft_cores.SHARED}
    wrong = False
    for version in versions:
        source = source_of(version)
        shown = run(source, "audit", "situation", model, json.dumps({"cores": [{"index": 0}, {"index": 16}]}))
        found = [line for of_index in shown for line in differences(of_index)]
        situations = sum(len(of_index["played"]) for of_index in shown)
        audits = run(source, "audit", "scheduler", model, json.dumps({"seeds": [1, 2], "chats": 60, "cores": cores}))
        errors = [f"{audit['core']}: {audit['errors']}" for audit in audits if audit["errors"]]
        drafting = [*draft_cores.CORES, *draft_cores.HEADS]
        if version != NO_WINDOWS:
            drafting += draft_cores.WINDOWS
        wanted["cores"] = drafting
        audited = run(source, "audit", "draft", drafting_model, json.dumps(wanted))
        drafts = [draft_cores.faults(audit) for audit in audited]
        held = (
            f"{situations - len(found)} of {situations} situations, {len(cores) - len(errors)} of {len(cores)} audits"
        )
        print(f"{version}: {held}, {drafts.count([])} of {len(drafting)} audits with drafts")
        faults = [*found, *errors, *itertools.chain.from_iterable(drafts)]
        for line in faults:
            print("  ", line)
        wrong = wrong or bool(faults)
    return int(wrong)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:] or ["0.31.0", "0.33.0"]))
