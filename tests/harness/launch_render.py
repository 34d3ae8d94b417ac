"""vLLM's own render server for a model folder: tokenizer and chat template without weights, up in some ten seconds.

It stands in for `vllm launch render`: the `vllm` script of CPU builds fails, because it looks for a distribution of
another name.
"""

from __future__ import annotations

import sys


def main(argv: list[str]) -> None:
    """Serve until terminated; `argv` as for `vllm launch render`."""
    import vllm.platforms
    from vllm.entrypoints.cli.launch import RenderSubcommand
    from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    assert vllm.platforms.current_platform is not None  # resolved before anything asks for a device
    arguments = make_arg_parser(FlexibleArgumentParser()).parse_args(argv)
    validate_parsed_serve_args(arguments)
    RenderSubcommand.cmd(arguments)


if __name__ == "__main__":
    main(sys.argv[1:])
