"""CPU time of vLLM's scheduler for prompts that nobody shares: Seamark's patches on, or vLLM untouched.

No model runs. Run as `python -m tests.harness.scheduler_cost MODEL '{"seamark": true, "lengths": [100], ...}'`, since
patching is per process. Prints JSON: milliseconds of CPU for each request, by its prompt's tokens.
"""

from __future__ import annotations

import json
import logging
import random
import sys
import time
from typing import Any

from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import init_none_hash
from vllm.v1.outputs import ModelRunnerOutput

from engine_patches import ledger
from engine_patches.patches import PATCHES
from tests.harness.scheduler_audit import Core

BLOCK = 528  # tokens, of Qwen3.5-4B

ANSWER_TOKENS = 4


class UnwatchedCore(Core):
    """A core whose steps are not audited: what takes time is vLLM's scheduler, and what is patched in it."""

    def step(self) -> Any:
        """Plan a step, and report a token for each request whose prompt is computed."""
        output = self.scheduler.schedule()
        names = list(output.num_scheduled_tokens)
        requests = [self.scheduler.requests[name] for name in names]
        sampled = [[7] if request.num_computed_tokens >= request.num_tokens else [] for request in requests]
        index = {name: number for number, name in enumerate(names)}
        runner = ModelRunnerOutput(req_ids=names, req_id_to_index=index, sampled_token_ids=sampled)
        self.scheduler.update_from_output(output, runner)
        return output


def milliseconds_each(core: Core, length: int, count: int, boundaries: list[int]) -> float:
    """CPU milliseconds for each of `count` new prompts of `length` tokens, one after the other."""
    draw = random.Random(f"{length} {boundaries}")
    prompts = [[draw.randrange(1000) for _ in range(length)] for _ in range(count)]
    before = time.process_time()
    for number, prompt in enumerate(prompts):
        core.request(f"{length}-{number}-{len(boundaries)}", prompt, boundaries or None, max_tokens=ANSWER_TOKENS)
        core.run()
    return (time.process_time() - before) / count * 1000


def main(model: str, argument: str) -> None:
    """`{"seamark": bool, "lengths": [tokens, ...], "count": n}`."""
    wanted = json.loads(argument)
    logging.disable(logging.WARNING)
    init_none_hash(sha256)
    if wanted["seamark"]:
        ledger.apply(PATCHES)
    core = UnwatchedCore(model, blocks=4000, budget=8192, block=BLOCK)
    found = {}
    for length in wanted["lengths"]:
        for kind, boundaries in ("plain", []), ("hinted", [length // 3, length // 3 * 2, length - 4]):
            milliseconds_each(core, length, wanted["count"] // 4, [*boundaries, length] if boundaries else [])
            found[f"{length} {kind}"] = milliseconds_each(core, length, wanted["count"], boundaries)
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:3])
