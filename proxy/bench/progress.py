"""What a benchmark says while it runs."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable


def narrator() -> Callable[[str], None]:
    """Prints lines to stderr with the seconds since this call. From here on `kill` ends all just as Ctrl-C does."""
    began = time.monotonic()
    signal.signal(signal.SIGTERM, signal.default_int_handler)

    def say(text: str) -> None:
        print(f"[{time.monotonic() - began:4.0f} s] {text}", file=sys.stderr, flush=True)

    return say
