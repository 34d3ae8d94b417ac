"""A model of what a real worker does to cache blocks, fed with nothing but the messages a real one gets.

Copies come first, then attention rows and recurrent states, then the states that a step was asked to write. Each block
remembers which prefix its contents stand for, so that whoever reads another one's is an error of the core.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from vllm.utils.math_utils import cdiv
from vllm.v1.kv_cache_interface import (
    KVCacheGroupSpec,
    get_mamba_prefill_checkpoint_position,
    is_mamba_prefill_checkpoint_valid,
)

from engine_patches.footprint import WRITES

if TYPE_CHECKING:
    from tests.harness.audited_core import Core

BLOCK, UNIT = 64, 16  # tokens


def prefixes(tokens: Iterable[Any]) -> list[int]:
    """Names of the contents that so many first tokens lead to, from none to all."""
    return list(itertools.accumulate(tokens, lambda name, token: hash((name, token)), initial=0))


def sample(tokens: Iterable[Any]) -> int:
    """The token that follows these."""
    return hash(tuple(tokens)) % 3


class Worker:
    """What a worker does to blocks in a step, in one engine. What differs in a model of another one is overridden."""

    # Whether it computes a step that is planned ahead behind the plan of the next one: what is loaded may come before.
    late = False

    # Whether what a step leaves under each key is judged; if not, only what requests find is.
    judges_keys = True

    counted: tuple[str, ...] = ()  # beside `COUNTED`

    core: Core

    def __init__(self) -> None:
        self.contents: dict[int, dict[Any, int]] = {}  # block id -> attention row, or "state" -> prefix
        self.tokens: dict[str, list[Any]] = {}  # of each request, as far as they are known
        self.tables: dict[str, list[list[int]]] = {}  # of blocks
        self.accepted: dict[str, int] = {}  # tokens of the last step that were right, where that is not 1
        self.loaded: set[str] = set()  # requests that began with what another engine computed
        self._state_index: dict[str, int] = {}

    # What it is told, in this order; a model of another worker does something then.

    def place_layers(self, groups: list[KVCacheGroupSpec]) -> None: ...  # cache groups of further layers

    def start(self) -> None: ...  # the scheduler is made

    def before_step(self) -> None: ...

    def planned(self, output: Any) -> None: ...  # it may be computed later

    def computed(self) -> None: ...  # all that is computed now was

    def connector_output(self) -> Any: ...  # what its KV connector reports with a step

    def reported(self, output: Any, answers: Mapping[int, Any]) -> None: ...  # the scheduler knows what it has computed

    def close(self) -> None: ...  # nothing more comes

    @property
    def busy(self) -> bool:
        """Whether anything is under way of which no request waits."""
        return False

    def compute(self, output: Any) -> dict[str, list[int]]:
        """What it does to blocks in one step; the tokens it samples for each request."""
        starts = self.receive(output)
        sampled = {}
        for name, count in output.num_scheduled_tokens.items():
            end = starts[name] + count
            self.core.chunk_ends.setdefault(name, []).append(end)
            sampled[name] = self.compute_row(name, starts[name], end, output)
            self.tokens[name] += sampled[name]
        return sampled

    def receive(self, output: Any) -> dict[str, int]:
        """What a step says of requests and blocks, before it is computed; the token from which each request runs."""
        for name in output.finished_req_ids:
            self.tables.pop(name, None)
        for name in begun(output) | set(output.finished_req_ids):
            self._state_index.pop(name, None)
            self.accepted.pop(name, None)
        for block in output.new_block_ids_to_zero or ():
            self.contents[block] = {}
        copies = output.kv_cache_block_copies or []
        self.contents.update([(copy[1], dict(self.contents.get(copy[0], {}))) for copy in copies])
        starts: dict[str, int] = {}
        for new in output.scheduled_new_reqs:
            starts[new.req_id] = new.num_computed_tokens
            self.tables[new.req_id] = [list(ids) for ids in new.block_ids]
            self.core.hits.setdefault(new.req_id, new.num_computed_tokens)
        cached = output.scheduled_cached_reqs
        for index, name in enumerate(cached.req_ids):
            starts[name] = cached.num_computed_tokens[index]
            blocks = cached.new_block_ids[index]
            if name in cached.resumed_req_ids:
                self.tables[name] = [list(ids) for ids in blocks]
            elif blocks is not None:
                for table, ids in zip(self.tables[name], blocks, strict=True):
                    table.extend(ids)
        for name in begun(output):
            if starts[name] % self.core.index_tokens:
                self.core.errors.append(f"{name} resumes at {starts[name]}, inside what its index has one key for")
        return starts

    def compute_row(self, name: str, start: int, end: int, output: Any) -> list[int]:
        """Run a request's tokens from `start` to `end`; what is sampled behind them."""
        tokens, writes = self.tokens[name], getattr(output, WRITES, None)
        names = prefixes(tokens[:end])
        column = self.start_column(name, start, end)
        self.attend(name, start, end, names, names)
        self.write_states(name, start, names, column, (writes or {}).get(name, ()))
        position = get_mamba_prefill_checkpoint_position(end, self.core.unit, False)
        exports = self.core.export and writes is None
        exports = exports and is_mamba_prefill_checkpoint_valid(start, end, position, self.core.unit, BLOCK, 1)
        for group in self.core.recurrent:
            table = self.tables[name][group]
            if exports and column - 1 < len(table) and table[column - 1]:
                self.contents[table[column - 1]] = {"state": names[position]}
            self.contents[table[column]] = {"state": names[end]}
        return [sample(tokens)] if end == len(tokens) else []

    def start_column(self, name: str, start: int, end: int) -> int:
        """The column of the block tables with the state to go on from, which has moved to the chunk's end."""
        before = self._state_index.get(name, (start - 1) // BLOCK if start else -1)
        after = self._state_index[name] = cdiv(end, BLOCK) - 1
        accepted = self.accepted.get(name, 1)
        if before in (-1, after):
            return after + accepted - 1
        for group in self.core.recurrent:
            table = self.tables[name][group]
            self.contents[table[after]] = dict(self.contents.get(table[before + accepted - 1], {}))
        return after

    def attend(self, name: str, start: int, end: int, seen: Sequence[int], known: Sequence[int]) -> None:
        """Read rows up to `start`, write those up to `end`. `prefixes` of what is computed, and of what is right."""
        for group in self.core.attention:
            rows, span = self.tables[name][group], self.core.spans[group]
            for position in range(self.core.first_read(group, start), start):
                found = self.contents.get(rows[position // span], {}).get(position % span)
                if found != known[position + 1] and not self.may_miss(name, group, position, found):
                    self.core.errors.append(f"{name} reads someone else's keys at {position} in group {group}")
                    break
            for position in range(start, end):
                self.contents.setdefault(rows[position // span], {})[position % span] = seen[position + 1]

    def may_miss(self, name: str, group: int, position: int, found: int | None) -> bool:
        """Whether a row that is not the right one is no error."""
        return False

    def write_states(self, name: str, start: int, seen: Sequence[int], column: int, asked: Iterable[Any]) -> None:
        """Go on from the state in a column, and write what the step asks for. `seen`: `prefixes`."""
        self.core.written.setdefault(name, []).extend(start + write.offset for write in asked)
        for group in self.core.recurrent:
            table = self.tables[name][group]
            if start and self.contents.get(table[column], {}).get("state") != seen[start]:
                self.core.errors.append(f"{name} resumes at {start} from a wrong state")
            for write in asked:
                self.contents[write.blocks[group]] = {"state": seen[start + write.offset]}


def begun(output: Any) -> set[str]:
    """Requests that a step starts, or starts again."""
    return {new.req_id for new in output.scheduled_new_reqs} | set(output.scheduled_cached_reqs.resumed_req_ids)
