"""Pools as `seamark worker --explain` reckons them, and as engine cores on a CPU have them, with a model's own layers.

Run apart with command lines of `seamark worker` as JSON, and `start` behind them to start the cores.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Sequence

from engine_patches import plugin
from engine_patches.commands import explain, worker
from tests.harness import started_engines
from tests.harness.engines import CPU_PROCESS

ROWS = r"cache block +(\S+) .*at once +\S+ requests of (\S+) tokens: (\S+) of (\S+) blocks"


def reckoned(arguments: Sequence[str]) -> tuple[list[int], str]:
    """As `measured`; and where vLLM is said not to start the context that fits, else nothing."""
    text = "\n".join(explain.explained(arguments, explain.HERE))
    fits = re.search(r"vLLM will not start: .* --max-model-len (\d+) fits", text)
    return [int(each.replace(",", "")) for each in re.search(ROWS, text, re.S).groups()], fits[1] if fits else ""


def measured(arguments: Sequence[str]) -> list[int] | str:
    """Tokens of a block and of the longest context, blocks that this takes, and blocks; or why vLLM does not start."""
    from vllm.v1.engine.core import EngineCore
    from vllm.v1.executor import Executor

    config = explain.configure(arguments)
    cache = config.cache_config
    started_engines.note("pools")
    try:
        core = EngineCore(config, Executor.get_class(config), log_stats=False)
    except ValueError as error:
        return str(error)
    core.shutdown()
    blocks = core.scheduler.kv_cache_manager.block_pool.num_gpu_blocks
    each = round(blocks / cache.kv_cache_max_concurrency)
    return [cache.block_size, config.model_config.max_model_len, each, blocks]


if __name__ == "__main__":
    os.environ.update(CPU_PROCESS | {"SEAMARK_ENGINE": "1"})
    plugin.register()
    told = []
    for command in json.loads(sys.argv[1]):
        model, flags, *_ = worker.read_command_line(command)
        arguments = worker.vllm_arguments(model, flags, {}, worker.cpu_flags(worker.config_of(model)["model_type"]))
        told.append([*reckoned(arguments), measured(arguments) if sys.argv[2:] else None])
    print(json.dumps(told))
