"""How the core of each recurrent layer is run: as vLLM has it, in a step's segments, or with states kept beside it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import vllm.platforms
from vllm import forward_context

from engine_patches import ledger, speculation
from engine_patches.families import GDN, RecurrentLayer, Shown
from engine_patches.footprint import RUNNING, SCAN_STATES, SEGMENTS
from engine_patches.forward import layers
from engine_patches.forward.layers import is_promised, promise_writes_in_forward, runs_whole_steps
from engine_patches.forward.segments import Segment
from engine_patches.forward.step_writes import Step, Write

TOKENS = 6

LAYER = "layers.0"


class Scene:
    """A step of six tokens that writes states, and the layer that runs in it."""

    def __init__(self, monkeypatch, **attached: Any) -> None:
        self.step = Step({"r": [Write(4, {0: 1})]}, {LAYER: 0}, ["r"])
        monkeypatch.setattr(RUNNING, "step", self.step)
        self.step.writes_by_row(1)
        self.metadata = SimpleNamespace(**attached)
        self.by_layer: Any = {LAYER: self.metadata}
        self.asked = 0
        monkeypatch.setattr(forward_context, "get_forward_context", self._context)
        # Block 5 holds the running state.
        self.layer = SimpleNamespace(prefix=LAYER, kv_cache=(torch.zeros(8),))
        self.inputs = [torch.arange(TOKENS) * factor for factor in (1, 10, 100)]
        self.output = torch.zeros(TOKENS, dtype=torch.int64)
        self.seen: list[Any] = []

    def _context(self) -> Any:
        self.asked += 1
        return SimpleNamespace(attn_metadata=self.by_layer)

    def core(self, layer: Any, *given: Any, **options: Any) -> str:
        """Adds up its inputs, by token."""
        *inputs, output = (*given, *options.values()) if not given or torch.is_tensor(given[0]) else given[1:]
        of_layer = given[0] if given and not torch.is_tensor(given[0]) else self._now()
        self.seen.append((of_layer, inputs[0].tolist()))
        layer.kv_cache[0][5] = len(self.seen)
        output.copy_(sum(inputs))
        return "ran"

    def _now(self) -> Any:
        return self.by_layer[LAYER] if isinstance(self.by_layer, dict) else None

    def wrote(self) -> bool:
        """Whether the layer said that its states are written."""
        return LAYER in self.step._written


def in_segments() -> dict[str, Any]:
    """A step that is cut behind its fourth token, where the running state goes to block 7."""
    first = Segment(slice(0, 4), "first", torch.tensor([5]), torch.tensor([7]))
    return {SEGMENTS: [first, Segment(torch.tensor([4, 5]), "second")]}


EXPECTED = [("first", [0, 1, 2, 3]), ("second", [4, 5])]


def assert_ran_in_segments(scene: Scene, factor: int) -> None:
    assert scene.seen == EXPECTED and scene.wrote()
    assert scene.output.tolist() == [token * factor for token in range(TOKENS)]
    assert scene.layer.kv_cache[0][7] == 1, "the state is kept once the first segment has run, and not again"
    assert scene.by_layer == {LAYER: scene.metadata}


def assert_ran_whole(scene: Scene, metadata: Any, factor: int, *, wrote: bool = False) -> None:
    assert scene.seen == [(metadata, list(range(TOKENS)))] and scene.wrote() is wrote
    assert scene.output.tolist() == [token * factor for token in range(TOKENS)]
    assert scene.layer.kv_cache[0][7] == 0


def run_gdn(scene: Scene) -> None:
    mixed_qkv, b, a = scene.inputs
    layers.gdn_in_segments(scene.core)(scene.layer, mixed_qkv, b, a, scene.output)


def run_cpu_gdn(scene: Scene) -> None:
    layers.cpu_gdn_in_segments(scene.core)(scene.layer, scene.metadata, *scene.inputs, scene.output)


def run_cpu_gdn_beside_drafts(scene: Scene) -> None:
    def core(layer: Any, metadata: Any, *given: Any, width: int, state_len: int) -> None:
        assert (width, state_len) == (4, 9)
        scene.core(layer, metadata, *given)

    def by_place(layer: Any, metadata: Any, *given: Any, **named: Any) -> None:
        *tensors, width, state_len = (*given, *named.values())
        core(layer, metadata, *tensors, width=width, state_len=state_len)

    patched = layers.cpu_gdn_beside_drafts_in_segments(by_place)
    patched(scene.layer, scene.metadata, *scene.inputs, scene.output, 4, 9)


@pytest.mark.parametrize("run", [run_gdn, run_cpu_gdn, run_cpu_gdn_beside_drafts])
def test_a_gated_delta_net_runs_in_the_segments_of_its_step_and_otherwise_in_one(monkeypatch, run):
    cut = Scene(monkeypatch, **in_segments())
    run(cut)
    assert_ran_in_segments(cut, 111)
    whole = Scene(monkeypatch)
    run(whole)
    assert_ran_whole(whole, whole.metadata, 111)


def run_convolution(scene: Scene) -> Any:
    return layers.convolution_with_states(scene.core)(scene.layer, scene.inputs[0], scene.output)


def test_a_short_convolution_runs_in_segments_or_in_one(monkeypatch):
    cut = Scene(monkeypatch, **in_segments())
    assert run_convolution(cut) is None
    assert_ran_in_segments(cut, 1)
    whole = Scene(monkeypatch)
    assert run_convolution(whole) == "ran", "what vLLM's own returns"
    assert_ran_whole(whole, whole.metadata, 1)


def test_a_short_convolution_with_states_to_keep_runs_in_one_and_says_that_they_are_written(monkeypatch):
    ran: list[Any] = []
    monkeypatch.setattr(layers, "run_convolution", lambda core, states: ran.append((states, core())))
    scene = Scene(monkeypatch, **{SCAN_STATES: "states"}, **in_segments())
    assert run_convolution(scene) is None
    assert ran == [("states", "ran")]
    assert_ran_whole(scene, scene.metadata, 1, wrote=True)


def run_mamba2(scene: Scene) -> None:
    layers.mamba2_with_states(scene.core)(scene.layer, scene.inputs[0], scene.output)


def test_mamba2_runs_in_segments_in_one_or_with_states_to_keep(monkeypatch):
    cut = Scene(monkeypatch, **in_segments())
    run_mamba2(cut)
    assert_ran_in_segments(cut, 1)
    whole = Scene(monkeypatch)
    run_mamba2(whole)
    assert_ran_whole(whole, whole.metadata, 1)
    ran: list[Any] = []
    monkeypatch.setattr(layers, "run_layer", lambda layer, core, *more: ran.append((layer, core(), more)))
    keeping = Scene(monkeypatch, **{SCAN_STATES: "states"}, **in_segments())
    run_mamba2(keeping)
    assert ran == [(keeping.layer, "ran", ("states", keeping.metadata, keeping.inputs[0]))]
    assert_ran_whole(keeping, keeping.metadata, 1, wrote=True)


@pytest.mark.parametrize("run", [run_gdn, run_convolution, run_mamba2])
def test_a_step_that_writes_nothing_does_not_even_look_for_metadata(monkeypatch, run):
    scene = Scene(monkeypatch, **in_segments())
    scene.step.writes = {}
    run(scene)
    assert scene.asked == 0 and len(scene.seen) == 1


@pytest.mark.parametrize("by_layer", [None, {}, {"layers.1": SimpleNamespace(**in_segments())}])
@pytest.mark.parametrize("run", [run_gdn, run_convolution, run_mamba2])
def test_a_layer_without_metadata_runs_as_ever(monkeypatch, run, by_layer):
    """As when vLLM measures what a pass takes."""
    scene = Scene(monkeypatch)
    scene.by_layer = by_layer
    monkeypatch.setattr(scene, "_now", lambda: "none")
    run(scene)
    assert [metadata for metadata, _ in scene.seen] == ["none"] and not scene.wrote()


def replaced(name: str) -> Any:
    def function(self: Any) -> None: ...

    setattr(function, ledger.NAME, name)
    return function


class Recurrent:
    _core = replaced("core")

    def get_attn_backend(self) -> Any:
        return SimpleNamespace(get_builder_cls=lambda: SimpleNamespace(build=replaced("states")))


def configuration(*, replays: bool = False, ubatching: bool = False, v2: bool = False) -> Any:
    return SimpleNamespace(
        cache_config=SimpleNamespace(use_replayssm=replays),
        parallel_config=SimpleNamespace(use_ubatching=ubatching),
        use_v2_model_runner=v2,
    )


def platform(name: str) -> Any:
    return SimpleNamespace(is_cpu=lambda: name == "cpu", is_cuda=lambda: name == "cuda")


@pytest.mark.parametrize(
    ("platform_name", "on_rocm", "options", "drafts", "promises"),
    [
        ("cpu", False, {}, "", True),
        ("cpu", False, {"v2": True}, "", False),
        ("cuda", False, {}, "", True),
        ("cuda", False, {"v2": True}, "", True),
        ("rocm", False, {}, "", False),
        ("rocm", True, {}, "", True),
        ("cuda", False, {"replays": True}, "", False),
        ("cuda", False, {"ubatching": True}, "", False),
        ("cuda", False, {}, "unsupported", False),
        ("cuda", False, {}, "supported", False),  # this layer's rows beside drafts are not known
    ],
)
def test_a_layer_promises_where_all_that_runs_it_is_known(
    monkeypatch, platform_name, on_rocm, options, drafts, promises
):
    known = RecurrentLayer(f"{__name__}:Recurrent", GDN, Shown.READ, "_core", on_rocm=on_rocm)
    monkeypatch.setattr(layers, "INSIDE", (known,))
    monkeypatch.setattr(vllm.platforms, "current_platform", platform(platform_name))
    monkeypatch.setattr(speculation, "unsupported", lambda _: "why" if drafts == "unsupported" else None)
    monkeypatch.setattr(speculation, "drafting", lambda _: bool(drafts))
    assert layers._writes_in_forward(Recurrent(), configuration(**options)) is promises


@pytest.mark.parametrize(("replays", "ubatching"), [(False, False), (True, False), (False, True), (True, True)])
def test_steps_run_whole_unless_they_are_split_or_states_are_replayed(replays, ubatching):
    assert runs_whole_steps(configuration(replays=replays, ubatching=ubatching)) is not (replays or ubatching)


def test_an_older_vllm_replays_nothing_and_has_one_model_runner(monkeypatch):
    config = configuration()
    del config.cache_config.use_replayssm, config.use_v2_model_runner
    assert runs_whole_steps(config)
    monkeypatch.setattr(layers, "INSIDE", (RecurrentLayer(f"{__name__}:Recurrent", GDN, Shown.READ, "_core"),))
    monkeypatch.setattr(vllm.platforms, "current_platform", platform("cpu"))
    monkeypatch.setattr(speculation, "unsupported", lambda _: None)
    monkeypatch.setattr(speculation, "drafting", lambda _: False)
    assert layers._writes_in_forward(Recurrent(), config)


@pytest.mark.parametrize(
    ("has_spec", "writes", "live", "promised"),
    [(True, True, True, True), (True, False, True, False), (True, True, False, False), (False, True, True, None)],
)
def test_a_spec_carries_the_promise_only_of_a_layer_that_keeps_it_with_live_patches(
    monkeypatch, has_spec, writes, live, promised
):
    relied: list[bool] = []
    monkeypatch.setattr(layers, "_writes_in_forward", lambda layer, config: writes)
    monkeypatch.setattr(ledger, "rely_on_patches", lambda: relied.append(live) or live)
    spec = SimpleNamespace(shapes=((1, 2),)) if has_spec else None
    found = promise_writes_in_forward(lambda self, config: spec)(None, None)
    assert found is spec and len(relied) == (has_spec and writes), "nobody relies on them for a layer that cannot"
    assert found is None or (is_promised(found) is promised and found.shapes == ((1, 2),))


def test_a_class_that_nobody_has_imported_has_no_layers():
    assert not layers._is_a("never.imported:Recurrent", Recurrent())
    assert not layers._is_a(f"{__name__}:Gone", Recurrent())
    assert layers._is_a(f"{__name__}:Recurrent", Recurrent())


def test_the_promise_of_all_is_asked_of_recurrent_layers_alone(engine_log):
    from vllm.v1.kv_cache_interface import MambaSpec

    def spec(*, promised: bool) -> MambaSpec:
        made = MambaSpec(block_size=64, shapes=((1,),), dtypes=(torch.float32,))
        if promised:
            layers.promise(made)
        return made

    workers = [{"m": spec(promised=True), "a": SimpleNamespace(shapes=())}, {"m": spec(promised=True)}]
    find = layers.require_promise_of_all(lambda self: workers)
    assert find(None) is workers and is_promised(workers[0]["m"]) and not engine_log.messages
    workers[1]["n"] = spec(promised=False)
    find(None)
    assert not is_promised(workers[0]["m"]) and workers[0]["m"].shapes == ((1,),) and len(engine_log.messages) == 1
    find(None)
    assert len(engine_log.messages) == 1, "there is nothing left to be taken back"
