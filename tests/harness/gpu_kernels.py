"""States written inside a pass by the kernels for CUDA, beside those of chunks that end there.

Run by `tests.harness.versions.interpreted` as `gpu_kernels FAMILY DTYPE CACHE_DTYPE [defects]`. Prints JSON: for each
layout of metadata, and each planted defect, how many numbers differ in what.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import sys
from collections.abc import Iterator
from typing import Any
from unittest import mock

from tests.harness import triton_interpreter

triton_interpreter.prepare()

import torch  # noqa: E402  (vLLM's platform has to be there first)

from engine_patches import ledger  # noqa: E402
from engine_patches.forward import scan_states, segments, step_writes  # noqa: E402
from engine_patches.patches import PATCHES  # noqa: E402
from tests.harness.mixer_steps import CHUNK, FAMILIES, GROUPS, Bench, Row, Tensors  # noqa: E402

TABLES, ALIGNED = "V1: block tables", "V2: aligned indices"

EARLY, MISSING, COLUMN, SHIFTED, PRECISION = (
    "a state one unit early",
    "a piece missing",
    "a wrong index column",
    "V2's aligned indices shifted",
    "a float32 cache written in bfloat16",
)

# Mamba2 takes the blocks of its running states from the block tables with either runner.
DEFECTS = {
    "mamba2": (EARLY, MISSING, COLUMN, PRECISION),
    "gdn": (EARLY, MISSING, COLUMN, SHIFTED, PRECISION),
}

UNIT = 16  # tokens

# A request that decodes, a fresh prompt, and one that goes on at token 32 and leaves a last piece of one token.
DECODE = Row("decode", 40, 1, ([1, 2, 0], [3, 4, 0]), prefills=False)
FRESH = Row("fresh", 0, 100, ([5, 6, 0], [7, 8, 0]))
RESUMED = Row("resumed", 32, 70, ([9, 10, 0], [11, 12, 0]))
PROMPTS = (FRESH, RESUMED)
ROWS = (DECODE, *PROMPTS)

# By row: tokens of the row before the state, and the block that takes it in each cache group. 64 tokens of the prompt
# are a chunk's end, all others lie inside of one.
WRITES = {
    "fresh": [(48, {0: 13, 1: 14}), (64, {0: 15, 1: 16})],
    "resumed": [(32, {0: 17, 1: 18}), (69, {0: 19, 1: 20})],
}


def joined(*parts: Tensors) -> Tensors:
    return tuple(torch.cat(tensors) for tensors in zip(*parts, strict=True))


class Scene:
    """The step, what it ran on, and what vLLM alone makes of it."""

    def __init__(self, family: str, dtype: torch.dtype, cache_dtype: torch.dtype) -> None:
        self.mixer = FAMILIES[family](dtype, cache_dtype)
        generator = torch.Generator().manual_seed(7)
        self.inputs = {row.name: self.mixer.inputs(row.new, generator) for row in ROWS}
        self.before = Bench(self.mixer)
        for row in (DECODE, RESUMED):
            earlier = Row(row.name, 0, row.computed, row.tables)
            self.before.step([earlier], self.mixer.inputs(row.computed, generator))
        # The copy that vLLM makes before a step whose running block is another one.
        for cache, table in zip(self.before.caches, RESUMED.tables, strict=True):
            for tensor in cache:
                tensor[table[1]] = tensor[table[0]]
        self.states: dict[tuple[str, int], Tensors] = {}
        self.running: dict[str, Tensors] = {}
        self.outputs = self._whole()
        if family != "mamba2":
            self._cut_at_states()
        else:
            self._end_at_states(narrow=cache_dtype == torch.bfloat16)

    def fresh_bench(self, v2: bool = False) -> Bench:
        return Bench(self.mixer, v2).copy_of(self.before)

    def _whole(self) -> dict[str, torch.Tensor]:
        """Outputs of vLLM alone, by row; its running states."""
        bench = self.fresh_bench()
        (output,) = bench.step(ROWS, joined(*self.inputs.values()), groups=(0,))
        for row in ROWS:
            self.running[row.name] = bench.state(0, row.tables[0][0 if row is DECODE else 1])
        return dict(zip(self.inputs, output.split([row.new for row in ROWS]), strict=True))

    def _cut_at_states(self) -> None:
        """A delta net is cut: what vLLM alone computes of both prompts if their chunks end where states are wanted."""
        bench = self.fresh_bench()
        outputs: dict[str, list[torch.Tensor]] = {row.name: [] for row in PROMPTS}
        cuts = {row.name: [0, *(offset for offset, _ in WRITES[row.name]), row.new] for row in PROMPTS}
        for number in range(len(cuts[FRESH.name]) - 1):
            parts = [(row, *cuts[row.name][number : number + 2]) for row in PROMPTS]
            parts.sort(key=lambda part: part[2] - part[1] > 1)  # vLLM has rows of a single token first
            found = self._chunks(bench, parts)
            for (row, _, end), output in zip(parts, found, strict=True):
                outputs[row.name].append(output)
                self.states[row.name, end] = self.running[row.name] = bench.state(0, row.tables[0][1])
        self.outputs.update({name: torch.cat(parts) for name, parts in outputs.items()})

    def _end_at_states(self, narrow: bool) -> None:
        """Mamba2 is not cut: each state is that of a chunk which ends there and begins where the row does.

        `narrow`: the cache rounds. The chunk then begins at the last end of a kernel's chunk, where a state is read.
        """
        for row in PROMPTS:
            for end, _ in WRITES[row.name]:
                bench = self.fresh_bench()
                last = (row.computed + end) // CHUNK * CHUNK - row.computed
                stops = [0, last, end] if narrow and 0 < last < end else [0, end]
                for begin, until in itertools.pairwise(stops):
                    self._chunks(bench, [(row, begin, until)])
                self.states[row.name, end] = bench.state(0, row.tables[0][1])

    def _chunks(self, bench: Bench, parts: list[tuple[Row, int, int]]) -> list[torch.Tensor]:
        """Outputs of a step of vLLM alone on some tokens of some rows, whose running states stay where they end."""
        rows, inputs = [], []
        for row, begin, end in parts:
            one_block = tuple([table[1]] * len(table) for table in row.tables)
            rows.append(Row(row.name, row.computed + begin, end - begin, one_block))
            inputs.append(tuple(tensor[begin:end] for tensor in self.inputs[row.name]))
        (output,) = bench.step(rows, joined(*inputs), groups=(0,))
        return list(output.split([row.new for row in rows]))

    def differences(self, v2: bool = False, shifted: bool = False) -> dict[str, dict[str, int]]:
        """Run the step with the plugin. How many numbers differ, in each state, output and running state."""
        bench = self.fresh_bench(v2)
        outputs = bench.step(ROWS, joined(*self.inputs.values()), WRITES, shifted=shifted)
        states, running, answers = {}, {}, {}
        for group in GROUPS:
            for row, (offset, blocks) in ((each, write) for each in PROMPTS for write in WRITES[each.name]):
                pairs = zip(bench.state(group, blocks[group]), self.states[row.name, offset], strict=True)
                for part, (found, right) in zip(("conv", "recurrent"), pairs, strict=True):
                    states[f"{row.name} at {row.computed + offset}, group {group}, {part}"] = unequal(found, right)
            of_rows = zip(ROWS, outputs[group].split([row.new for row in ROWS]), strict=True)
            for row, output in of_rows:
                answers[f"{row.name}, group {group}"] = unequal(output, self.outputs[row.name])
                found = bench.state(group, row.tables[group][0 if row is DECODE else 1])
                running[f"{row.name}, group {group}"] = sum(map(unequal, found, self.running[row.name]))
        return {"states": states, "outputs": answers, "running": running}


def unequal(found: torch.Tensor, right: torch.Tensor) -> int:
    """Numbers that differ by a bit or more. A state of zeros would prove nothing."""
    assert found.dtype == right.dtype and right.count_nonzero() > right.numel() // 2
    return int((found != right).sum())


@contextlib.contextmanager
def planted(defect: str, family: str) -> Iterator[dict[str, bool]]:
    """The plugin with a defect; what `Scene.differences` needs besides."""
    if defect in (COLUMN, SHIFTED):
        yield {"v2": defect == SHIFTED, "shifted": True}
        return
    owner, name, broken = _broken(defect, family)
    with mock.patch.object(owner, name, broken):
        yield {}


def _broken(defect: str, family: str) -> tuple[Any, str, Any]:
    if defect == EARLY:
        writes_by_row = step_writes.Step.writes_by_row

        def one_unit_early(self: Any, rows: int) -> Any:
            found = writes_by_row(self, rows)
            return {row: [each._replace(offset=each.offset - UNIT) for each in writes] for row, writes in found.items()}

        return step_writes.Step, "writes_by_row", one_unit_early
    if family == "mamba2":
        if defect == MISSING:  # what lies between a chunk's end and the state
            return scan_states, "_tails_of", lambda *args: None
        scan = scan_states.ScanPlan.scan

        def keep_bfloat16(self: Any, function: Any, ssm_state: Any, blocks: Any, *rest: Any) -> Any:
            found = scan(self, function, ssm_state, blocks, *rest)
            ssm_state[blocks] = ssm_state[blocks].bfloat16().to(ssm_state.dtype)
            return found

        return scan_states.ScanPlan, "scan", keep_bfloat16
    if defect == MISSING:
        levels = segments._levels
        return segments, "_levels", lambda *args: [level for number, level in enumerate(levels(*args)) if number != 1]

    def keep_states(self: Any, kv_cache: Any) -> None:
        if self.targets is not None:
            for state in kv_cache:
                state[self.targets] = state[self.sources].bfloat16().to(state.dtype)

    return segments.Segment, "keep_states", keep_states


def main(family: str, dtype: str, cache_dtype: str, *what: str) -> None:
    ledger.apply(PATCHES)
    scene = Scene(family, getattr(torch, dtype), getattr(torch, cache_dtype))
    found = {TABLES: scene.differences(), ALIGNED: scene.differences(v2=True)}
    for defect in DEFECTS[family] if what else ():
        with planted(defect, family) as options:
            found[defect] = scene.differences(**options)
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
