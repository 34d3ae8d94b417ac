"""How a scheduler is set up, what it says of its model's states when it starts, and what it counts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.core.single_type_kv_cache_manager import MambaManager
from vllm.v1.kv_cache_interface import MambaSpec

from engine_patches import ledger, settings
from engine_patches.scheduler import hooks, preflight
from engine_patches.scheduler.checkpoints import Checkpoints
from engine_patches.scheduler.grid import Grid
from engine_patches.scheduler.hooks import (
    LEAVE_WEIGHTS,
    count_hits,
    count_tail_states,
    forget_weights_that_may_change,
    release_before_reset,
    warn_of_narrow_states,
)
from engine_patches.scheduler.planner import HINTED, LEARNED, TAIL
from engine_patches.scheduler.preflight import PreflightFailed
from engine_patches.scheduler.request_state import RequestState, Wish
from tests.harness.audit import UNIT, WEIGHTS, Core
from tests.harness.patched_vllm import environment_kept, patched_vllm


def spec(states: torch.dtype) -> MambaSpec:
    """Of a layer that keeps its convolution's inputs in bfloat16, and the state itself in `states`."""
    return MambaSpec(block_size=64, shapes=((1,), (1,)), dtypes=(torch.bfloat16, states))


@pytest.mark.parametrize(
    ("states", "named"),
    [
        ([torch.float32], None),
        ([torch.float64], None),
        ([torch.float32, torch.bfloat16, torch.bfloat16], "kept in bfloat16:"),
        ([torch.float16, torch.bfloat16], "kept in bfloat16, float16:"),
    ],
)
def test_states_that_are_rounded_are_named_once_with_the_flag_that_keeps_them_whole(engine_log, states, named):
    warn_of_narrow_states([spec(each) for each in states])
    assert len(engine_log.messages) == (named is not None)
    for line in engine_log.messages:
        assert named in line and "--mamba-ssm-cache-dtype float32" in line


def test_states_that_are_rounded_at_random_on_purpose_are_named_with_that_flag_and_no_advice(engine_log):
    engine_log.set_level("INFO", "vllm.seamark")
    warn_of_narrow_states([spec(torch.float16)], at_random=True)
    (line,) = engine_log.messages
    assert "float16" in line and "--enable-mamba-cache-stochastic-rounding" in line and "float32" not in line
    warn_of_narrow_states([spec(torch.float32)], at_random=True)
    assert len(engine_log.messages) == 1


@pytest.fixture(scope="module")
def patched() -> Iterator[None]:
    with patched_vllm():
        yield


@pytest.fixture
def made(patched: None, model: Path) -> Iterator[Callable[..., Core]]:
    """A core with the options of `Core`."""
    with environment_kept():
        yield lambda **options: Core(str(model), **options)


def recurrent(core: Core) -> list[Any]:
    managers = core.scheduler.kv_cache_manager.coordinator.single_type_managers
    return [manager for manager in managers if isinstance(manager, MambaManager)]


def test_a_scheduler_and_all_its_cache_managers_share_one(made):
    core = made()
    manager = core.scheduler.kv_cache_manager
    held = [each.seamark for each in (core.scheduler, manager, *manager.coordinator.single_type_managers)]
    assert len(held) == 5 and all(each is held[0] for each in held)


def test_a_model_that_writes_states_inside_a_pass_has_all_that_goes_with_it(made):
    core = made(blocks=101, pins=0.5)
    checkpoints = core.scheduler.seamark
    states = checkpoints.states
    assert checkpoints.grid == Grid(UNIT, UNIT) and checkpoints.block_size == 64 and checkpoints.verified == 1
    assert checkpoints.refusal is None and checkpoints.weights == WEIGHTS and checkpoints.writes_in_forward
    assert checkpoints.gate is not None and states.retention is not None and states.windows is None
    assert states.num_bytes == sum(each.kv_cache_spec.page_size_bytes for each in recurrent(core))
    assert states.keys.recurrent == {0: 64, 2: 64} and [each.group for each in states.keys.attention] == [1]
    # vLLM writes no states of its own into blocks that are hidden from it.
    assert not core.scheduler.mamba_has_prefill_checkpoint_blocks
    assert not any(manager.has_prefill_checkpoint_blocks for manager in recurrent(core))
    assert not any(manager.shared_prefix_checkpoint for manager in recurrent(core))


def test_pins_and_states_hold_the_shares_that_the_settings_say(made, monkeypatch):
    monkeypatch.setenv(settings.STATE_SHARE, "0.25")
    core = made(blocks=101, pins=0.1)
    states = core.scheduler.seamark.states
    assert states.retention.make_room(25) and not states.retention.make_room(26)
    assert states.pins._limit == 0  # a request of the greatest length would not fit beside any
    assert made(blocks=601, pins=0.1).scheduler.seamark.states.pins._limit == 60


def test_a_model_whose_states_cost_a_pass_each_has_them_from_vllm(made):
    core = made(writes_in_forward=False)
    checkpoints = core.scheduler.seamark
    assert checkpoints.states is not None and not checkpoints.writes_in_forward
    assert checkpoints.gate is None and checkpoints.states.retention is None
    assert all(manager.shared_prefix_checkpoint for manager in recurrent(core))
    assert core.scheduler.mamba_has_prefill_checkpoint_blocks
    assert all(manager.has_prefill_checkpoint_blocks for manager in recurrent(core))


def test_no_request_is_held_back_where_that_is_switched_off(made, monkeypatch):
    monkeypatch.setenv(settings.FAN_OUT, "0")
    checkpoints = made().scheduler.seamark
    assert checkpoints.gate is None and checkpoints.writes_in_forward


def test_states_lie_where_a_kernels_chunks_end_if_they_are_written_inside_a_pass(made, monkeypatch):
    monkeypatch.setenv(settings.CHUNK_ENDS, "1")
    aligned, cut = (made(writes_in_forward=each).scheduler.seamark.grid for each in (True, False))
    assert aligned.unit == cut.unit == cut.alignment == UNIT < aligned.alignment and aligned.alignment % UNIT == 0


@pytest.mark.parametrize(("unit", "fine"), [(64, True), (16, False)])
def test_whole_blocks_are_found_as_if_they_were_parts(made, unit, fine):
    core = made(unit=unit)
    assert core.scheduler.seamark.states is not None
    assert core.scheduler.kv_cache_manager.coordinator.enable_partial_hash_hits or not fine


@pytest.mark.parametrize(("unit", "told"), [(16, "inside the pass, on multiples of 16 tokens"), (64, "match unit 64")])
def test_it_says_where_states_lie(made, monkeypatch, unit, told):
    lines: list[str] = []
    monkeypatch.setattr(hooks, "logger", SimpleNamespace(info=lambda text, *more: lines.append(text % more)))
    made(unit=unit)
    (line,) = lines
    assert told in line and "cache block 64 tokens" in line and not line.endswith(": ") and "connector" not in line


def refused(core: Core) -> str:
    """Why hints are refused; vLLM then caches as it does alone."""
    checkpoints = core.scheduler.seamark
    assert checkpoints.states is None and checkpoints.gate is None and not checkpoints.writes_in_forward
    assert core.scheduler.mamba_has_prefill_checkpoint_blocks
    assert checkpoints.refusal.reason == "no_states"
    return str(checkpoints.refusal.cause)


def test_a_cache_that_behaves_otherwise_is_left_to_vllm(made, monkeypatch):
    def fails(*, windows: bool) -> None:
        raise PreflightFailed(f"an evicted state is found, windows: {windows}")

    monkeypatch.setattr(preflight, "run", fails)
    assert refused(made()).endswith("preflight check: an evicted state is found, windows: False")


def test_patches_that_were_taken_back_are_not_relied_on(made, monkeypatch):
    monkeypatch.setattr(ledger, "_live", False)
    assert "patches were taken back" in refused(made())


def test_a_refusal_is_said(made, monkeypatch):
    lines: list[str] = []
    warned = SimpleNamespace(warning=lambda text, *more: lines.append(text % more), info=lambda *_: None)
    monkeypatch.setattr(hooks, "logger", warned)
    core = made(window=128)
    assert core.scheduler.seamark.refusal.cause in lines[0] and len(lines) == 1
    made()
    assert len(lines) == 1


def test_a_connector_of_ours_is_introduced_and_others_need_not_know(made, monkeypatch):
    introduced: list[tuple[Any, Any]] = []

    def again(self: Any, vllm_config: Any, kv_cache_config: Any) -> None:
        """As if vLLM made the same scheduler, with a connector of ours."""
        self.connector = SimpleNamespace(seamark_introduce=lambda *given: introduced.append(given))

    core = made()
    scheduler = core.scheduler
    hooks.set_up_checkpoints(again)(scheduler, scheduler.vllm_config, scheduler.kv_cache_manager.kv_cache_config)
    assert introduced == [(scheduler.seamark, core.pool)]


def test_blocks_of_states_are_given_back_with_the_step_that_wrote_them(made, monkeypatch):
    core = made()
    given, give_back = [], core.scheduler._free_cow_retained_blocks

    def free(blocks: list[Any], step: int) -> None:
        given.append((len(blocks), step - core.scheduler.sched_step_seq))
        give_back(blocks, step)

    monkeypatch.setattr(core.scheduler, "_free_cow_retained_blocks", free)
    core.request("a", range(1000, 1100), [32])
    core.run()
    assert (2 * 2, 0) in given and core.blocks_in_use() == 0  # two states, of two groups


class Counted(SimpleNamespace):
    """As much of `Checkpoints` as is told of states that vLLM registers."""

    def __init__(self, wish: Wish, *, inside: bool = False, enabled: bool = True) -> None:
        keys = SimpleNamespace(recurrent={4: 64, 2: 64})
        self.written: list[tuple[bytes, str]] = []
        super().__init__(
            writes_in_forward=inside,
            states=SimpleNamespace(keys=keys) if enabled else None,
            state_of=lambda request: RequestState(wish),
            state_written=lambda key, kind: self.written.append((key, kind)),
        )


@pytest.mark.parametrize(
    ("wish", "kind"),
    [
        (Wish(), TAIL),
        (Wish((160,)), HINTED),
        (Wish(learned=160), LEARNED),
        (Wish((160,), learned=160), HINTED),
        (Wish((144,), learned=176), TAIL),
    ],
)
def test_a_state_that_vllm_keeps_at_a_chunks_end_is_counted_once_for_all_groups(wish, kind):
    counted = Counted(wish)
    register = count_tail_states(lambda manager, request, num_tokens, interval: b"key")
    for group in (2, 4):
        manager = SimpleNamespace(seamark=counted, kv_cache_group_id=group)
        assert register(manager, "a request", 160, None) == b"key"
    assert counted.written == [(b"key", kind)]


def test_a_state_that_vllm_does_not_register_is_not_counted():
    for counted, key in ((Counted(Wish()), None), (Counted(Wish(), enabled=False), b"key"), (None, b"key")):
        manager = SimpleNamespace(kv_cache_group_id=4, **({} if counted is None else {"seamark": counted}))
        assert count_tail_states(lambda *_, key=key: key)(manager, "a request", 160, None) == key
        assert counted is None or counted.written == []


def test_where_states_are_written_inside_a_pass_vllm_registers_none():
    counted = Counted(Wish(), inside=True)
    register = count_tail_states(lambda *_: pytest.fail("registered"))
    assert register(SimpleNamespace(seamark=counted, kv_cache_group_id=4), "a request", 160, None) is None


@pytest.mark.parametrize(("loaded", "told"), [({}, (160, 0)), ({"seamark_loaded": 32}, (192, 32))])
def test_hits_are_counted_and_those_of_a_disk_are_told_apart(loaded, told):
    found, admitted, recorded = [], [], []
    checkpoints = SimpleNamespace(
        counters=SimpleNamespace(cache_hit=found.append),
        states=object(),
        admitted=lambda request, *tokens: admitted.append(tokens),
    )
    request = SimpleNamespace(**loaded)
    count = count_hits(lambda manager, request, hits: recorded.append(hits))
    count(SimpleNamespace(seamark=checkpoints), request, 160)
    assert (found, admitted, recorded) == ([160], [told], [160])
    checkpoints.states = None
    count(SimpleNamespace(seamark=checkpoints), request, 64)
    assert (found, admitted, recorded) == ([160, 64], [told], [160, 64])
    count(SimpleNamespace(), request, 7)
    assert recorded[-1] == 7


class Resetting(SimpleNamespace):
    """As much of a scheduler as empties its cache."""

    def __init__(self, states: Any = None) -> None:
        self.told: list[str] = []
        super().__init__(seamark=SimpleNamespace(states=states, before_reset=lambda: self.told.append("before")))


@pytest.mark.parametrize("emptied", [True, False])
def test_a_cache_without_states_is_emptied_as_ever(emptied):
    scheduler = Resetting()
    reset = release_before_reset(lambda self, *given, **named: (self.told.append(f"{given}{named}"), emptied)[1])
    assert reset(scheduler, True, and_connector=True) is emptied
    assert scheduler.told == ["before", "(True,){'and_connector': True}"]


@pytest.mark.parametrize("emptied", [True, False])
def test_that_no_state_is_found_any_more_is_an_event_only_if_it_is_so(emptied):
    events: list[str] = []
    states = SimpleNamespace(
        pins=SimpleNamespace(let_go=lambda: {"a": "pin"}, take_again=lambda pins: events.append(f"again {pins}")),
        events=SimpleNamespace(clear=lambda: events.append("cleared")),
    )
    assert release_before_reset(lambda self: emptied)(Resetting(states)) is emptied
    assert events == (["cleared"] if emptied else ["again {'a': 'pin'}"])


@pytest.mark.parametrize(
    ("method", "may_change"), [*((method, False) for method in LEAVE_WEIGHTS), ("reload_weights", True), (print, True)]
)
def test_calls_that_may_change_the_weights_are_told(method, may_change):
    told: list[bool] = []
    engine = SimpleNamespace(
        scheduler=SimpleNamespace(seamark=SimpleNamespace(weights_may_change=lambda: told.append(True)))
    )
    call = forget_weights_that_may_change(lambda self, *given, **named: (given, named, list(told)))
    # Before it is made: what it changes is changed when it returns.
    assert call(engine, method, 1, args=2) == ((method, 1), {"args": 2}, [True] * may_change)
    for other in (SimpleNamespace(), SimpleNamespace(scheduler=SimpleNamespace())):
        assert call(other, method)[0] == (method,)
    assert told == [True] * may_change


def test_a_checkpoints_forgets_its_weights_and_closes_what_keeps_states_beyond_the_cache():
    closed: list[str] = []
    states = SimpleNamespace(store=SimpleNamespace(close=closed.append), keys=None)
    checkpoints = Checkpoints(Grid(UNIT, UNIT), 64, states, weights=WEIGHTS)
    checkpoints.weights_may_change()
    assert not checkpoints.weights.name and closed == [checkpoints.weights.unknown] and "changed" in closed[0]
    never_known = Checkpoints(Grid(UNIT, UNIT), 64)
    before = never_known.weights
    never_known.weights_may_change()
    assert never_known.weights is before
