"""One engine of `seamark gpu-check` on a CPU, with the stand-ins that drafts need there: `draft_job JOB RESULT`."""

from __future__ import annotations

import sys

from engine_patches.gpu_check import job
from tests.harness import draft_kernels

if __name__ == "__main__":
    draft_kernels.install(set(draft_kernels.ALL))
    sys.exit(job.main(sys.argv[1:]))
