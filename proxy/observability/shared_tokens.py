"""What an engine with the plugin would have learnt from prompts: where they part, by hashes of their tokens.

The plugin's `SeenPrefixes` for workers that run without it: the second prompt that begins like an earlier one shows
where the two part, and the third finds a state there.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterator, Sequence

from xxhash import xxh3_64_digest

# Hashes of whole prefixes, unit by unit: four million tokens in units of 16, some 40 MB.
MAX_HASHES = 2**18

# Tokens; a shorter shared beginning is not learnt.
MIN_SHARED = 128


class SharedTokens:
    """Beginnings of prompts, bounded; the oldest are forgotten first."""

    def __init__(self, unit: int, most: int = MAX_HASHES) -> None:
        """`unit`: the match unit in tokens. `most`: hashes that are kept."""
        self._unit = unit
        self._most = most
        self._prefixes: OrderedDict[bytes, bool] = OrderedDict()  # by hash: whether prompts have parted there

    def look(self, apart: bytes, ids: Sequence[int]) -> int:
        """Tokens of the deepest state that earlier prompts have led to; learns from this prompt, token ids `ids`.

        `apart` is what else parts the caches: the worker's boot, the salt.
        """
        held = shared = 0
        last = None
        hashes = list(self._hashes(apart, ids[:-1]))  # the last token is always computed
        for number, name in enumerate(hashes, 1):
            parted = self._prefixes.get(name)
            if parted is None:
                break
            shared, last = number, name
            if parted:
                held = number
        if last is not None and shared * self._unit >= MIN_SHARED:
            self._prefixes[last] = True
        for name in hashes:
            self._prefixes.setdefault(name, False)
            self._prefixes.move_to_end(name)
        while len(self._prefixes) > self._most:
            self._prefixes.popitem(last=False)
        return held * self._unit

    def _hashes(self, apart: bytes, ids: Sequence[int]) -> Iterator[bytes]:
        name = apart
        for start in range(0, len(ids) - self._unit + 1, self._unit):
            name = xxh3_64_digest(name + array("Q", ids[start : start + self._unit]).tobytes())
            yield name
