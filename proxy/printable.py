"""Text from outside, as it may stand in a log or on a terminal: what a terminal would obey is written as an escape.

Names from workers, files and clients could otherwise clear an operator's screen, or forge a line of a log.
"""

from __future__ import annotations

import logging
from typing import Any


def printable(text: object) -> str:
    """In one line, with an escape in place of each character that cannot be shown."""
    shown = str(text)
    return shown if shown.isprintable() else "".join(c if c.isprintable() else ascii(c)[1:-1] for c in shown)


def printable_lines(text: object) -> str:
    """The same of a text of our own in several lines; names in it are `printable` already."""
    return "\n".join(map(printable, str(text).split("\n")))


class PrintableFormatter(logging.Formatter):
    """A log's lines, of which each is one record, or one line of its traceback."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        record.message = printable(record.message.rstrip("\n"))
        return super().formatMessage(record)

    def formatException(self, ei: Any) -> str:
        return printable_lines(super().formatException(ei))
