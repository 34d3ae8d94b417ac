"""How the plugin sees vLLM's requests and steps: where chunks end, what has to be done and written, and by whom."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from engine_patches.footprint import RUNNING, WRITES
from engine_patches.forward import step_writes
from engine_patches.forward.segments import _levels
from engine_patches.forward.step_writes import StatesNotWritten, Step, Write, wrote_states
from engine_patches.scheduler import counters
from engine_patches.scheduler.counters import REPORT_INTERVAL, AdmittedRequest, Counters
from engine_patches.scheduler.planner import Grid, RequestState, Wish
from engine_patches.scheduler.state_writes import next_stop, run_to_the_budget
from engine_patches.upstream_fixes import decline_late_reads


@pytest.mark.parametrize("grid", [Grid(16, 16), Grid(16, 64)])
@pytest.mark.parametrize(("prompt", "tokens"), [(250, 250), (100, 250)])  # the second one was preempted
def test_a_chunk_ends_where_a_state_can_lie_or_with_all_that_is_known(grid, prompt, tokens):
    request = SimpleNamespace(num_prompt_tokens=prompt, num_tokens=tokens)
    for start in range(0, tokens, 6):
        for wanted in range(1, tokens - start + 1):
            end = start + run_to_the_budget(request, start, wanted, grid)
            reaches_the_end = start + wanted >= max(prompt, tokens - 1)  # the last token is a step's own
            aligned = [each for each in range(0, start + wanted + 1, grid.alignment) if each > start]
            assert end == (start + wanted if reaches_the_end or not aligned else aligned[-1])


@pytest.mark.parametrize(
    ("wish", "junction", "per_pass", "stops"),
    [
        (Wish((160, 464)), 0, 100, {0: 160, 159: 160, 160: 464, 463: 464, 464: 0, 900: 0}),
        (Wish((160, 464)), 0, 161, {0: 464}),
        (Wish((464,), learned=160), 0, 100, {0: 160, 48: 160, 64: 464, 160: 464}),  # a pass behind the start
        (Wish((464,)), 400, 0, {0: 384, 384: 464}),  # vLLM's own, floored to its block
    ],
)
def test_a_cut_is_made_at_the_next_position_that_is_worth_a_pass(wish, junction, per_pass, stops):
    state = RequestState(wish, upstream_junction=junction)
    assert {start: next_stop(state, start, 384, per_pass) for start in stops} == stops


class Numbers(list[int]):
    """A tensor on the CPU, as far as it is read."""

    def tolist(self) -> list[int]:
        return list(self)


FIRST, SECOND = {0: 7}, {0: 8}  # blocks by cache group


@pytest.mark.parametrize(
    ("rows", "writes", "levels"),
    [
        ([(0, 10), (32, 1)], {0: [Write(10, FIRST)]}, [([1, 0], [1, 10], [(0, FIRST)])]),  # at its end: no cut
        (
            [(0, 10), (16, 6)],
            {0: [Write(4, FIRST), Write(10, SECOND)]},
            [([0, 1], [4, 6], [(0, FIRST)]), ([0], [6], [(0, SECOND)])],
        ),
        ([(0, 8)], {0: [Write(5, FIRST), Write(5, SECOND)]}, [([0], [5], [(0, FIRST), (0, SECOND)]), ([0], [3], [])]),
        # Single tokens behind a state come first, as backends expect them, and a prompt's first token does not.
        (
            [(0, 6), (0, 1), (40, 1), (20, 6)],
            {0: [Write(5, FIRST)], 3: [Write(1, SECOND)]},
            [([2, 3, 0, 1], [1, 1, 5, 1], [(3, SECOND), (0, FIRST)]), ([0, 3], [1, 5], [])],
        ),
        ([(0, 0), (0, 4), (0, 0)], {1: [Write(2, FIRST)]}, [([1], [2], [(1, FIRST)]), ([1], [2], [])]),  # padding
    ],
)
def test_a_step_is_cut_at_the_states_it_writes(rows, writes, levels):
    """Rows are given as (tokens computed before, tokens of the chunk)."""
    starts = Numbers(sum(chunk for _, chunk in rows[:at]) for at in range(len(rows) + 1))
    ends = Numbers(before + chunk for before, chunk in rows)
    batch = SimpleNamespace(num_reqs=len(rows), query_start_loc_cpu=starts, seq_lens_cpu_upper_bound=ends)
    found = _levels(batch, writes)
    assert [(level.rows, level.lengths, sorted(level.writes, key=str)) for level in found] == [
        (rows, lengths, sorted(written, key=str)) for rows, lengths, written in levels
    ]
    assert [level.whole for level in found] == [len(levels) == 1] * len(levels)
    run: dict[int, int] = {}
    for level in found:  # each token runs once, in order
        for row, begin, length, end in zip(level.rows, level.begins, level.lengths, level.ends, strict=True):
            assert begin == starts[row] + run.get(row, 0) and end == rows[row][0] + run.get(row, 0) + length
            run[row] = run.get(row, 0) + length


def sent(told: Any = None, computed: int = 0, params: bool = True) -> SimpleNamespace:
    extra = None if told is None else {counters.LOAD_FIELD: told}
    sampling = SimpleNamespace(extra_args=extra) if params else None
    return SimpleNamespace(sampling_params=sampling, num_prompt_tokens=1000, num_computed_tokens=computed)


@pytest.mark.parametrize(
    ("requests", "loads"),
    [
        ([], {}),
        ([sent("ab,1000,400"), sent("ab,1000,400", 700), sent()], {"ab": (2, 700), "": (1, 1000)}),
        ([sent("ab,1000,400", 16), sent("ab,1000,400", 1007)], {"ab": (2, 984)}),  # the engine has looked, or generates
        *(
            ([sent(told)], {"": (1, 1000)})
            for told in ("a,1,-1", "a,1,1,1", "A,1,1", 7, "a" * 33 + ",1,1", "a,1,\u0661")
        ),
    ],
)
def test_each_gateway_has_its_requests_and_what_is_left_of_their_prompts(requests, loads):
    assert counters.loads_of_gateways(requests) == loads == counters.loads_of_gateways(requests)


@pytest.mark.parametrize(("new", "tokens", "may"), [([], 64, True), (["a"], 2, True), ([], 2, False)])
def test_loads_are_added_up_where_a_step_may_have_changed_them(new, tokens, may):
    planned = SimpleNamespace(scheduled_new_reqs=new, scheduled_spec_decode_tokens={"a": [7]})
    planned.num_scheduled_tokens, planned.total_num_scheduled_tokens = {"a": tokens}, tokens
    assert counters.loads_may_have_changed(planned) is may and counters.loads_may_have_changed(None)


ADMITTED = AdmittedRequest("r", "hit", 160, 176, (163, 0))


@pytest.mark.parametrize(
    ("count", "counts"),
    [
        (lambda counted: counted.counts.written.update({"tail": 1}), {"written": {"tail": 2}}),
        (lambda counted: counted.hint_ignored("malformed"), {"ignored": {"malformed": 2}}),
        (lambda counted: counted.counts.followers.update({"not_worth_it": 1}), {"followers": {"not_worth_it": 2}}),
        (lambda counted: counted.request_admitted(ADMITTED), {"outcomes": {"hit": 2}, "requests": [ADMITTED] * 2}),
        (lambda counted: counted.prompt_pinned("r", "pinned"), {"pinned": [("r", "pinned")] * 2}),
        (lambda counted: setattr(counted.counts, "cache_hit_tokens", 32), {"cache_hit_tokens": 32}),
        (lambda counted: setattr(counted.counts, "loads_declined", 2), {"loads_declined": 2}),
        (lambda counted: counted.disk_used({"damaged": 1}, 5, 7), {"files_refused": {"damaged": 2}, "file_bytes": 10}),
    ],
)
def test_what_is_counted_makes_a_report_due_and_is_reported_once_and_otherwise_time_does(count, counts, monkeypatch):
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr(counters.time, "monotonic", lambda: clock.now)
    counted = Counters()
    assert counted.report_due, "nothing was reported yet"
    counted.take()
    for _ in range(2):
        count(counted)
        counted.counts.windows["held"] += 1
        assert counted.report_due
    expected = {"windows": {"held": 2}, **counts}
    assert counted.take() == counters.Counts(**expected)
    assert not counted.report_due and counted.disk_bytes == (7 if "file_bytes" in counts else 0)
    clock.now += REPORT_INTERVAL
    assert counted.report_due and counted.take().empty
    for _ in range(counters.MAX_REQUESTS + 10):
        count(counted)
    kept = counted.take()
    assert len(kept.requests) <= counters.MAX_REQUESTS >= len(kept.pinned)


WRITE = Write(4, {0: 7})  # blocks by cache group

LAYERS = {"layers.0": 0, "layers.1": 0, "layers.2": 1}  # the last one is no recurrent layer


def runner(*names: str) -> Any:
    """vLLM's, with a batch of such requests."""
    groups = [SimpleNamespace(layer_names=["layers.0", "layers.1"]), SimpleNamespace(layer_names=["layers.2"])]
    batch = SimpleNamespace(req_ids=[*names])
    return SimpleNamespace(kv_cache_config=SimpleNamespace(kv_cache_groups=groups), input_batch=batch)


def run(worker: Any, writes: Any, does: Any) -> Any:
    """One step that does so, and what it returns."""

    def execute_model(runner: Any, output: Any, *arguments: Any, **options: Any) -> Any:
        step = RUNNING.step
        assert step_writes.writes_nothing() is (step is not None and not writes)
        return does(step), arguments, options

    output = SimpleNamespace() if writes is None else SimpleNamespace(**{WRITES: writes})
    try:
        return step_writes.track_steps(execute_model)(worker, output, 1, a=2)
    finally:
        assert RUNNING.step is None, "after it nothing is known"


@pytest.mark.parametrize(
    ("rows", "layers", "fault"),
    [
        (2, ["layers.0", "layers.1"], ""),
        (2, ["layers.0"], r"layers\.1 kept no states.*SEAMARK_ENGINE=0"),
        (1, ["layers.0", "layers.1"], "1 requests of this step were not in its batch"),
    ],
)
def test_a_state_that_is_not_written_ends_the_engine(rows, layers, fault):
    def does(step: Step) -> None:
        assert step.writes_by_row(rows) == ({1: [WRITE]} if rows == 2 else {}) and step.group_of_layer == LAYERS
        for layer in layers:
            wrote_states(layer)

    if not fault:
        assert run(runner("a", "b"), {"b": [WRITE]}, does) == (None, (1,), {"a": 2})
        return
    with pytest.raises(StatesNotWritten, match=fault):
        run(runner("a", "b"), {"b": [WRITE]}, does)


def test_a_step_that_fails_or_writes_nothing_or_is_left_to_vllm_has_to_keep_nothing():
    def fails(step: Step) -> None:
        raise MemoryError

    with pytest.raises(MemoryError):
        run(runner("b"), {"b": [WRITE]}, fails)
    run(runner("b"), {}, lambda step: None)
    assert run(runner("b"), None, lambda step: step) == (None, (1,), {"a": 2})
    wrote_states("layers.0")  # outside of a step


def test_layers_have_the_groups_of_the_cache_that_there_is_now():
    worker = runner()
    (first, *_), (second, *_) = (run(worker, {}, lambda step: step.group_of_layer) for _ in range(2))
    assert first == LAYERS and second is first, "they are found once"
    worker.kv_cache_config = SimpleNamespace(kv_cache_groups=[SimpleNamespace(layer_names=["layers.9"])])
    assert run(worker, {}, lambda step: step.group_of_layer)[0] == {"layers.9": 0}


def test_a_runner_that_makes_a_batch_for_each_step_tells_its_requests(monkeypatch):
    made, worker = SimpleNamespace(req_ids=["b", "a"]), runner()
    del worker.input_batch
    assert list(run(worker, {}, lambda step: step.req_ids)[0]) == []
    prepare = step_writes.track_batch(
        lambda *arguments, **options: made if (arguments, options) == (("r", 1), {"a": 2}) else None
    )
    for step in (None, Step({"a": [WRITE]}, {})):
        monkeypatch.setattr(RUNNING, "step", step)
        assert prepare("r", 1, a=2) is made
    assert step.writes_by_row(2) == {1: [WRITE]}


@pytest.mark.parametrize("runs", [True, False])
def test_vllm_exports_no_states_of_its_own_while_a_step_writes_them(monkeypatch, runs):
    monkeypatch.setattr(RUNNING, "step", Step({}, {}) if runs else None)
    build = step_writes.skip_vllm_exports(lambda *given: given)
    assert build("builder", "m", "rows") == (None if runs else ("builder", "m", "rows"))


@pytest.mark.parametrize(
    ("known", "invalid", "lends", "late", "is_read"),
    [
        (True, False, False, False, True),
        (True, False, False, True, False),
        (False, False, False, True, True),  # its clock is not known yet: vLLM shakes hands first
        (True, True, False, True, True),  # vLLM gives it up itself
        (True, False, True, True, True),  # vLLM asks for the deadline itself
    ],
)
def test_only_a_read_of_blocks_that_may_have_been_freed_is_declined_and_vllm_hears_of_it(
    known, invalid, lends, late, is_read
):
    happened: list[Any] = []
    worker = SimpleNamespace(
        _remote_agents={"w": 1} if known else {},
        _invalid_remote_engines={"w"} if invalid else set(),
        _bidirectional_kv_xfer_enabled=lends,
        _recv_failures=["failures"],
        xfer_stats=SimpleNamespace(record_kv_expired_req=lambda: happened.append("expired")),
        _is_turn2_read_expired=lambda meta: late,
        _handle_failed_transfer=lambda *given, **more: happened.append((*given, more)),
    )
    meta = SimpleNamespace(remote=SimpleNamespace(engine_id="w"))
    decline_late_reads(lambda self, *given: happened.append(given))(worker, "r", meta)
    failed = ("r", None, ["failures"], {"record_failed_transfer": False})
    assert sorted(happened, key=str) == sorted([("r", meta)] if is_read else ["expired", failed], key=str)
