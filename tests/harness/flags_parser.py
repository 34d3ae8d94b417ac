"""vLLM's own parser of a server's command line, of whichever vLLM is imported.

`python -m tests.harness.flags_parser LINES`: a JSON list of command lines; prints what each is parsed to.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from typing import Any
from unittest.mock import patch

from engine_patches.commands import worker


def parser() -> Any:
    """The parser of `vllm serve`."""
    try:
        from vllm.entrypoints.launchers.cli_args import make_arg_parser
    except ImportError:
        from vllm.entrypoints.common.cli_args import make_arg_parser  # from 0.33 on
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    # It loads the plugins that are installed, and ours would stay in the process of whoever asks.
    with patch.dict(os.environ, {"VLLM_PLUGINS": ""}):
        return make_arg_parser(FlexibleArgumentParser())


def given_by_worker(words: Sequence[str], *, on_cpu: bool = False) -> list[str]:
    """The command line of the server that `seamark worker WORDS` would start."""
    started: list[list[str]] = []
    with (
        patch.object(worker, "is_cpu_build", lambda: on_cpu),
        patch.object(worker, "vllm_environment", lambda *_: {}),
        patch.object(worker, "serve", lambda arguments, _: started.append(arguments) or 0),
    ):
        assert worker.main(list(words)) == 0
    (line,) = started
    return line


def main(lines: str) -> None:
    made = parser()
    print(json.dumps([vars(made.parse_args(line)) for line in json.loads(lines)], default=repr))


if __name__ == "__main__":
    main(*sys.argv[1:])
