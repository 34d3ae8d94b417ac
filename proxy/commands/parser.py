"""The command line of every gateway command: no abbreviations, and a wrong flag costs a line, not a page of usage.

With abbreviations, `--workers` was taken for `--workers-file`, and each new flag could change what an old script means.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from itertools import takewhile
from typing import Any, NoReturn

from proxy.errors import did_you_mean


class Parser(argparse.ArgumentParser):
    """Flags have to be written out; one that does not exist is answered with those that read like it."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **{"allow_abbrev": False, **options})

    def parse_known_args(  # type: ignore[override]  # argparse overloads it by the kind of namespace
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[Any, list[str]]:
        given = sys.argv[1:] if args is None else args
        # Before argparse looks: it would first complain of a required flag that the wrong one was meant to be.
        known = [flag.removeprefix("--") for flag in self._option_string_actions if flag.startswith("--")]
        for argument in takewhile(lambda argument: argument != "--", given):
            name = argument.partition("=")[0].removeprefix("--")
            if argument.startswith("--") and name not in known:
                self.error(f"no flag --{name}{did_you_mean(name, known, '--')}")
        return super().parse_known_args(given, namespace)

    def error(self, message: str) -> NoReturn:
        """Exit with status 2 and one line; the flags are one command away."""
        self.exit(2, f"{self.prog}: {message} ({self.prog} --help lists all flags)\n")
