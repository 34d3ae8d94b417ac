"""vLLM's own parser of a server's command line, of whichever vLLM is imported.

`python -m tests.harness.flags_parser LINES`: a JSON list of command lines; prints what each is parsed to.
"""

from __future__ import annotations

import json
import sys
from typing import Any


def parser() -> Any:
    """The parser of `vllm serve`."""
    try:
        from vllm.entrypoints.launchers.cli_args import make_arg_parser
    except ImportError:
        from vllm.entrypoints.common.cli_args import make_arg_parser  # from 0.33 on
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    return make_arg_parser(FlexibleArgumentParser())


def main(lines: str) -> None:
    made = parser()
    print(json.dumps([vars(made.parse_args(line)) for line in json.loads(lines)], default=repr))


if __name__ == "__main__":
    main(*sys.argv[1:])
