"""Pools of blocks as `seamark worker --explain` reckons them, and as the engine cores have them that vLLM makes.

Run apart as `measured_pools`, with command lines of `seamark worker` as JSON; `start` behind them starts the cores, on
a CPU, with the model's own layers and weights. Prints JSON: for each what is reckoned, and what the core has.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Sequence
from typing import NamedTuple

from engine_patches import plugin
from engine_patches.commands import explain, worker
from tests.harness import started_engines
from tests.harness.engines import CPU_PROCESS
from tests.harness.recipes import Said


class Pool(NamedTuple):
    """Blocks, and tokens where so named."""

    blocks: int
    block_tokens: int
    request_blocks: int  # that vLLM wants for a request of the longest context
    context_tokens: int


def reckoned(command: Sequence[str]) -> tuple[Pool, str]:
    """With the length that fits where vLLM will not start; else that is empty."""
    text = "\n".join(explain.explained(_arguments(command), explain.HERE))
    rows = Said(text, "").rows
    at_once = re.fullmatch(r"\S+ requests of (\S+) tokens: (\S+) of (\S+) blocks each", rows["at once"])
    context, each, blocks = (int(number.replace(",", "")) for number in at_once.groups())
    fits = re.search(r"vLLM will not start: .* --max-model-len (\d+) fits", text)
    return Pool(blocks, int(rows["cache block"].split()[0].replace(",", "")), each, context), fits[1] if fits else ""


def measured(command: Sequence[str]) -> Pool | str:
    """Or what vLLM says in place of a start."""
    from vllm.v1.engine.core import EngineCore
    from vllm.v1.executor import Executor

    config = explain.configure(_arguments(command))
    started_engines.note("pools")
    try:
        core = EngineCore(config, Executor.get_class(config), log_stats=False)
    except ValueError as error:
        return str(error)
    cache = config.cache_config
    blocks = core.scheduler.kv_cache_manager.block_pool.num_gpu_blocks
    each = round(blocks / cache.kv_cache_max_concurrency)
    core.shutdown()
    return Pool(blocks, cache.block_size, each, config.model_config.max_model_len)


def _arguments(command: Sequence[str]) -> list[str]:
    model, flags, *_ = worker.read_command_line(command)
    return worker.vllm_arguments(model, flags, {}, worker.cpu_flags(worker.config_of(model)["model_type"]))


def main() -> None:
    os.environ.update(CPU_PROCESS | {"SEAMARK_ENGINE": "1"})
    plugin.register()
    start = sys.argv[2:] == ["start"]
    told = [[*reckoned(command), measured(command) if start else None] for command in json.loads(sys.argv[1])]
    print(json.dumps(told))


if __name__ == "__main__":
    main()
