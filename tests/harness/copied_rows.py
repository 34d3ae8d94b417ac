"""In place of NIXL: rows of host memory copied between the workers of one process, at once or when it is let."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar

from vllm.v1.kv_offload.tiering.p2p.data.base import DataTransport, PollResult


class CopiedRows(DataTransport):  # type: ignore[misc]  # vLLM is untyped to mypy
    """vLLM's `p2p` tier finds it under the name of its own transport."""

    all: ClassVar[dict[bytes, CopiedRows]] = {}

    numbers: ClassVar[Any] = itertools.count()

    available = True

    def __init__(self, name: str, view: memoryview, config_fields: Any = None, **_: Any) -> None:
        super().__init__(view, config_fields)
        self.name, self.rows = name.encode(), view.cast("B")
        self.all[self.name] = self
        self.copied = 0  # rows that others were given
        self.held = False  # whether a transfer that has begun is left undone
        self.waiting: dict[int, tuple[str, Callable[[], None]]] = {}
        self._remote: dict[str, CopiedRows] = {}

    def get_agent_metadata(self) -> bytes:
        return self.name

    def add_remote_peer(self, peer_id: str, agent_metadata: bytes, *_: Any, **__: Any) -> None:
        self._remote[peer_id] = self.all[agent_metadata]

    def remove_remote_peer(self, peer_id: str) -> None:
        self._remote.pop(peer_id, None)

    def write_blocks(self, peer_id: str, local_idxs: Sequence[int], remote_idxs: Sequence[int]) -> int:
        to, size = self._remote[peer_id], self.block_len

        def copy() -> None:
            self.copied += len(local_idxs)
            for one, other in zip(local_idxs, remote_idxs, strict=True):
                to.rows[other * size : (other + 1) * size] = self.rows[one * size : (one + 1) * size]

        number: int = next(self.numbers)
        self.waiting[number] = peer_id, copy
        return number

    def poll(self, peer_id: str | None = None) -> PollResult:
        done = [] if self.held else [each for each, (to, _) in self.waiting.items() if peer_id in (None, to)]
        for each in done:
            self.waiting.pop(each)[1]()
        return PollResult(done, ())

    def cancel(self, transfer_ids: Iterable[int], mode: str = "immediate") -> list[int]:
        return [each for each in transfer_ids if each in self.waiting] if mode == "wait" else []

    def close(self) -> None:
        self.waiting.clear()
