"""What Redis answers, within bounds: hiredis believes every length that an answer announces, and what it then does is
done in one go. An answer beyond them counts as garbage before it is parsed."""

from __future__ import annotations

import re
from typing import Any

from redis.asyncio.connection import DefaultParser
from redis.exceptions import ConnectionError as ClosedByRedis
from redis.exceptions import InvalidResponse

# Of one command. What gateways write gives less even with a thousand workers, each of which has a stream.
MOST_BYTES, MOST_LINES = 2**21, 2**14

# How a list of ten thousand elements begins, or of more. Records hold this by chance less than once in 10**18 bytes.
_LONG_LIST = re.compile(rb"\r\n[*%~>|]\d{5,}\r\n")

LONGEST_HEADER = 32  # bytes of a header that hiredis takes, which two pieces may share


class AnswerTooLarge(InvalidResponse):
    """It is no answer to what was asked."""


class BoundedParser(DefaultParser):  # type: ignore[valid-type, misc]  # redis gives it as a variable
    """As a connection's `parser_class`."""

    def on_connect(self, connection: Any) -> None:
        super().on_connect(connection)
        self._bytes = self._lines = 0
        self._before = b"\r\n"

    async def read_response(self, *args: Any, **kwargs: Any) -> Any:
        """The next answer. Raises `AnswerTooLarge`."""
        self._bytes = self._lines = 0
        return await super().read_response(*args, **kwargs)

    async def read_from_socket(self) -> bool:
        """Give the next piece to hiredis. Raises `AnswerTooLarge`."""
        piece: bytes = await self._stream.read(self._read_size)
        if not piece:
            raise ClosedByRedis("Redis has closed the connection")
        self._bytes += len(piece)
        self._lines += piece.count(b"\r\n")
        joined = self._before + piece
        if self._bytes > MOST_BYTES or self._lines > MOST_LINES or _LONG_LIST.search(joined) is not None:
            raise AnswerTooLarge
        self._before = joined[-LONGEST_HEADER:]
        self._reader.feed(piece)
        return True
