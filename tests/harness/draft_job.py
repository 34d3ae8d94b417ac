"""One engine of `seamark gpu-check` on a CPU, with the stand-ins that drafts need there.

`draft_job JOB RESULT [WINDOW [DEFECT]]`: the MTP head's attention has a window (tokens), and a defect is planted.
"""

from __future__ import annotations

import sys

from engine_patches.gpu_check import job
from tests.harness import draft_defects, draft_engines, draft_kernels

if __name__ == "__main__":
    _, asked, result, *more = sys.argv
    draft_kernels.install(set(draft_kernels.ALL))
    for window in more[:1]:
        draft_engines.slide(int(window))
    for defect in more[1:]:
        draft_defects.plant(defect)
    sys.exit(job.main([asked, result]))
