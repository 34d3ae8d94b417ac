"""Where a prompt leaves those before it: what the engine learns of sharing by itself, in any API and template.

vLLM names each whole prefix by a hash, unit by unit, and the hash covers all that makes two prefixes differ: tokens,
cache salt, LoRA, images, embeddings. So no text is kept, and prompts of another salt never match.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

MAX_HASHES = 1 << 18  # 4 million tokens at a unit of 16; some 190 bytes each


class SeenPrefixes:
    """Hashes of the whole prefixes of earlier prompts, least recently seen first.

    With each prompt its hashes become recent from the deepest to the shallowest. So of two hashes of one prompt the
    deeper one is always forgotten first, and what is known of a prompt is a beginning of it: a binary search finds it.
    """

    def __init__(self, max_hashes: int = MAX_HASHES) -> None:
        self._max_hashes = max_hashes
        self._hashes: OrderedDict[bytes, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._hashes)

    def deepest(self, hashes: Sequence[bytes]) -> int:
        """Units of the longest beginning that an earlier prompt had; `hashes` of its prefixes, by units, are kept."""
        seen = self._hashes
        low, high = 0, len(hashes)
        while low < high:
            middle = (low + high + 1) // 2
            if hashes[middle - 1] in seen:
                low = middle
            else:
                high = middle - 1
        for prefix in reversed(hashes[low:]):
            seen[prefix] = None
        for prefix in reversed(hashes[:low]):
            seen.move_to_end(prefix)
        for _ in range(len(seen) - self._max_hashes):
            seen.popitem(last=False)
        return low
