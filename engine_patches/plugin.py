"""Entry point of the vLLM plugin: apply the ledger once per process, or leave vLLM as it is and say so in one line.

vLLM loads plugins in every process and more than once, and only logs what they raise; so this never raises.
"""

from __future__ import annotations

import os

from engine_patches import ledger
from engine_patches.settings import FULL, IMAGE, MODE_VARIABLE, OFF, REFERENCE, SUPPORTED, logger, take_along_to_ray
from engine_patches.version import version


def register() -> None:
    """Apply what `SEAMARK_ENGINE` asks for: `1` (default) everything, `reference` only the cures, `0` nothing."""
    take_along_to_ray()  # here, since each process that starts others has run it by then; the mode 0, too, is for all
    mode = os.environ.get(MODE_VARIABLE, FULL).strip().lower()
    if mode == OFF:
        return
    if mode not in (FULL, REFERENCE):
        logger.error("seamark: %s=%r is not one of 1, reference, 0; vLLM is left untouched", MODE_VARIABLE, mode)
        return
    try:
        from engine_patches.patches import PATCHES

        applied = ledger.apply([patch for patch in PATCHES if mode == FULL or patch.role is ledger.PatchRole.CURE])
    except Exception as error:
        known = f"the patches fit vLLM {SUPPORTED}, for one {IMAGE}"
        logger.error("seamark: vLLM is left untouched, no checkpoints: %s; %s", error, known)
        return
    if mode == FULL and applied:
        logger.info("Seamark %s: %d patches live", version(), applied)
