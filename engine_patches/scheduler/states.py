"""The states of one scheduler's cache: the blocks they are written into, and which of them stay."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from engine_patches.scheduler.adapters import adapter_name
from engine_patches.scheduler.draft_windows import DraftWindows
from engine_patches.scheduler.held_keys import HeldKeys
from engine_patches.scheduler.pins import PINNED, Pins
from engine_patches.scheduler.request_state import RequestState
from engine_patches.scheduler.retention import Retention
from engine_patches.scheduler.state_events import StateEvents

# States whose bytes are counted, and hits on them; an older one is forgotten. Real caches hold some hundreds.
MAX_WRITTEN = 65_536


class StateStore(Protocol):
    """What keeps states beyond the cache."""

    def offer(self, request: Any, position: int, used: bool = True) -> None:
        """The request's state at `position` (tokens) is cached; `used`: a request resumed from it, or it is pinned."""

    def close(self, why: str) -> None:
        """Hold no block that is not being copied, and find nothing any more. `why`: half a sentence for the log."""


@dataclass
class States:
    """Lives in the scheduler's process, on its one thread. Positions in tokens."""

    keys: HeldKeys
    pins: Pins
    in_pass: bool = False  # states are written inside a pass; if not, chunks are cut for them
    retention: Retention | None = None  # None if vLLM keeps the states
    num_bytes: int = 0  # of one state, all recurrent layers
    give_back: Callable[[list[Any]], None] | None = None  # frees blocks of states; None: the pool does, at once
    store: StateStore | None = None  # None without a directory for checkpoints
    windows: DraftWindows | None = None  # None without a draft head that has any
    unwritten: dict[int, int] = field(default_factory=dict)  # attention block -> token from which the step fills it
    _held: list[Any] = field(default_factory=list)  # blocks written in the running step
    _spare: list[bytes] = field(default_factory=list)  # keys of those that nobody asked for

    def __post_init__(self) -> None:
        self.events = StateEvents(self.keys)
        self._written = self.keys.watch()

    def begin_step(self) -> None:
        """A step is going to be planned."""
        self.release()
        self.unwritten.clear()

    def release(self) -> None:
        """Make the blocks of the last step's states cache like any other.

        That step may still run. Workers run steps in order, so the next owner of such a block writes after it; only
        what a KV connector loads comes in no such order, and `give_back` waits for the step if there may be one.
        """
        if self._held:
            held, self._held = self._held, []
            (self.give_back or self.keys.pool.free_blocks)(held)
        if self._spare and self.retention is not None:
            self._spare = [key for key in self._spare if not self.retention.give_up(key)]

    @property
    def has_idle(self) -> bool:
        """Whether a state would put out nothing that is of use."""
        groups = len(self.keys.recurrent)
        has_blocks = self.keys.pool.get_num_free_blocks() >= groups
        return has_blocks and self.retention is not None and self.retention.has_idle(groups)

    def reserve(self, request: Any, position: int, turn: bool, *, spare: bool = False) -> list[Any] | None:
        """Blocks for a state that this step writes, one per recurrent group, registered under the position's keys.

        `turn`: it serves one conversation; `spare`: it puts out nothing that is of use, and goes before all that is.
        None if the cache has no blocks to spare.
        """
        pool, groups = self.keys.pool, self.keys.recurrent
        if pool.get_num_free_blocks() < len(groups) or (spare and not self.has_idle):
            return None
        if self.retention is not None and not self.retention.make_room(len(groups)):
            return None
        blocks: list[Any] = pool.get_new_blocks(len(groups))
        self._held += blocks
        for (group, block_size), block in zip(groups.items(), blocks, strict=True):
            pool.cache_partial_block(
                request=request,
                block=block,
                num_tokens=position,
                kv_cache_group_id=group,
                block_size=block_size,
                replace_existing_hashes=True,  # it has none; vLLM 0.31 requires the argument at a block's edge
            )
        if self.retention is not None:
            self.retention.add(blocks[0].block_hash, blocks, turn)
        if spare:
            self._spare.append(blocks[0].block_hash)
        return blocks

    def went_on(self, request: Any, position: int, before: int, named: Iterable[int]) -> None:
        """The turn of a request's conversation that ends at `position` follows the one that ended at `before`.

        `named`: positions of its hint.
        """
        if self.retention is not None:
            key, earlier, *others = (self.keys.state_key(request, each) for each in (position, before, *named))
            self.retention.went_on(key, earlier, others)

    def written(self, key: bytes) -> None:
        """The state under `key` was counted as written."""
        self._written.add(key, (key,))
        self._written.remove_oldest(MAX_WRITTEN)

    def is_written(self, key: bytes) -> bool:
        """Whether the state under `key` is one of those."""
        return key in self._written

    @property
    def bytes_held(self) -> int:
        """Bytes of those that are still cached."""
        self._written.lost()
        return len(self._written) * self.num_bytes

    def positions_with_keys(self, state: RequestState, manager: Any, num_tokens: int) -> list[int]:
        """Positions up to `num_tokens` at which the request's blocks in an attention manager carry keys of ours."""
        drop = self.keys.grid.drop_in(manager)
        positions = state.states if self.in_pass else state.wish.positions
        return [position + drop for position in positions if position + drop <= num_tokens]

    def offer(self, request: Any, positions: Iterable[int], used: bool = True) -> None:
        """The request's states at `positions` are cached, as `StateStore.offer` is told."""
        if self.store is not None:
            for position in positions:
                self.store.offer(request, position, used)

    def resumed(self, request: Any, position: int, passed: Sequence[int], *, shared: bool, loaded: bool) -> None:
        """A request resumes from its state at `position`, behind those it has `passed`.

        `shared`: that shows that others share it; `loaded`: it does not come from the cache.
        """
        if not loaded:
            self.offer(request, [position])
        if self.retention is not None:
            self.retention.resumed(self.keys.state_key(request, position), shared)
            self.retention.refresh(self.keys.state_key(request, each) for each in passed)

    def keep_windows(self, request: Any, state: RequestState, positions: Sequence[int]) -> None:
        """The step that is planned computes a request up to `positions`: a draft head's rows are found there."""
        if self.windows is None:
            return
        for position, blocks in self.windows.keep(request, state, positions).items():
            if self.retention is not None:
                self.retention.add_window(self.keys.state_key(request, position), blocks)

    def pin(self, request: Any, positions: Sequence[int]) -> str:
        """Pin a prompt's states at those of `positions` where they are found; what became of it, one of `pins`."""
        found = {position: keys for position in positions if (keys := self.keys.found(request, position))}
        prompt = self.keys.grid.hash_of(request, request.num_prompt_tokens)
        windows = [self.windows.keys_at(request, position) for position in found] if self.windows is not None else []
        fate = self.pins.pin(prompt, itertools.chain(*found.values(), *windows), adapter_name(request))
        if fate == PINNED:
            self.offer(request, found)
        return fate

    def unpin(self, request: Any) -> str:
        """Release a prompt that was pinned."""
        return self.pins.release(self.keys.grid.hash_of(request, request.num_prompt_tokens))

    def adapter_replaced(self, name: str) -> None:
        """The LoRA adapter `name` has other contents from now on: nothing that it left in the cache can be found."""
        self.pins.release_adapter(name)
        self.events.adapter_replaced(name)

    def before_reset(self) -> None:
        """The cache is going to be emptied, which may be for weights that were changed in place."""
        self.release()
        if self.store is not None:
            self.store.close("the cache is emptied")
        if self.retention is not None:
            self.retention.clear()
        if self.windows is not None:
            self.windows.clear()
