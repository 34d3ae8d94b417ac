"""Beside which KV connectors states are written inside a pass, and what is said of the others."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from engine_patches import kv_connectors, module_source
from engine_patches.commands import worker
from engine_patches.commands.explain import about
from engine_patches.commands.model_layers import is_hybrid
from engine_patches.commands.worker import refusal, transfer_config
from engine_patches.disk.flags import transfer_flags
from engine_patches.kv_connectors import CONNECTORS, UNKNOWN, ConnectorLane, Decision, decide_by
from engine_patches.ledger import Shape, ShapeMismatch


def configured(name: str, **more: Any) -> dict[str, Any]:
    """Fields of vLLM's `KVTransferConfig`."""
    extra = {key: more.pop(key) for key in ("connectors", "bidirectional_kv_xfer") if key in more}
    return {"kv_connector": name, "kv_role": "kv_both", "kv_connector_extra_config": extra, **more}


OWN = configured("SeamarkConnector", kv_connector_module_path="engine_patches.disk.connector")

PULL, PUSH = configured("NixlConnector"), configured("NixlPushConnector")


def multi(*children: dict[str, Any]) -> dict[str, Any]:
    return configured("MultiConnector", connectors=list(children))


@pytest.mark.parametrize(
    ("transfer", "named"),
    [
        (PUSH, "NixlPushConnector"),
        (configured("OffloadingConnector"), "OffloadingConnector"),
        (configured("OfSomebody"), "OfSomebody"),
        (configured("NixlConnector", kv_connector_module_path="my.connectors"), "NixlConnector"),
        (configured("LMCacheConnectorV1", kv_connector_module_path="my.connectors"), "LMCacheConnectorV1"),
        (configured("MultiConnector"), "MultiConnector"),
        (configured("MultiConnector", connectors=[PULL], kv_connector_module_path="my"), "MultiConnector"),
        (configured("NixlConnector", bidirectional_kv_xfer=True), "NixlConnector with bidirectional_kv_xfer"),
        (multi(PULL, configured("OffloadingConnector")), "OffloadingConnector"),
        (multi(PULL, multi(PULL, PUSH)), "NixlPushConnector"),
    ],
)
def test_a_connector_that_is_not_known_to_leave_their_blocks_alone_costs_passes_and_is_named(transfer, named):
    decision = decide_by(transfer)
    assert decision.lane is ConnectorLane.CHUNK_ENDS and decision.reason == f"{named} {UNKNOWN}"
    (line,) = about(decision)
    assert named in line and "a state costs a pass" in line


def test_a_buffer_in_the_hosts_memory_is_one_only_beside_a_gpu():
    buffered = configured("NixlConnector", kv_buffer_device="cpu")
    assert decide_by(buffered, on_cpu=True).lane is ConnectorLane.INSIDE
    assert decide_by(buffered, on_cpu=False).lane is ConnectorLane.CHUNK_ENDS
    assert decide_by(configured("NixlConnector", kv_buffer_device="cuda"), on_cpu=False).lane is ConnectorLane.INSIDE


def test_a_nixl_that_was_not_shown_costs_passes_and_the_difference_is_named(monkeypatch):
    other = Shape(kv_connectors._SHOWN[0].target, "self, request")
    monkeypatch.setattr(kv_connectors, "_SHOWN", (other,))
    decision = decide_by(PULL)
    assert decision.lane is ConnectorLane.CHUNK_ENDS and "expected (self, request)" in decision.reason
    assert decide_by({}).lane is ConnectorLane.INSIDE


NOT_SERVED = [name for name, lane in CONNECTORS.items() if lane is ConnectorLane.NOT_SERVED]


@pytest.mark.parametrize("name", NOT_SERVED)
def test_the_worst_of_several_connectors_counts(name):
    for transfer in (configured(name), multi(configured("DecodeBenchConnector"), configured(name), PULL)):
        decision = decide_by(transfer)
        assert decision.lane is ConnectorLane.NOT_SERVED and decision.reason.startswith(
            f"{name} knows caches of one kind"
        )
        assert list(about(decision)) == [decision.reason]


@pytest.fixture
def lmcache(monkeypatch, tmp_path) -> Iterator[Path]:
    """Where LMCache would be installed, with a connector of its own."""
    folder = tmp_path / "lmcache" / "integration" / "vllm"
    folder.mkdir(parents=True)
    for package in (folder, folder.parent, folder.parents[1]):
        (package / "__init__.py").touch()
    (folder / "lmcache_mp_connector.py").write_text("class LMCacheMPConnector:\n    pass\n")
    yield tmp_path
    module_source.forget()


def test_a_connector_that_lmcache_brings_is_left_to_vllm(monkeypatch, lmcache):
    assert decide_by(configured("LMCacheMPConnector")).lane is ConnectorLane.NOT_SERVED
    monkeypatch.syspath_prepend(lmcache)
    assert decide_by(configured("LMCacheMPConnector")).lane is ConnectorLane.CHUNK_ENDS
    assert decide_by(configured("LMCacheConnectorV1")).lane is ConnectorLane.NOT_SERVED


LMCACHE = configured("LMCacheConnectorV1")


@pytest.mark.parametrize(
    ("given", "config"),
    [
        ([], {}),
        (["--kv-cache-dtype", "fp8"], {}),
        (["--kv-transfer-config"], {}),
        (["--kv-transfer-config", "{"], {}),
        (["--kv-transfer-config", "[]"], {}),
        (["--kv-offloading-backend", "lmcache"], {}),
        (["--kv-transfer-config", json.dumps(PULL)], {"kv_transfer_config": LMCACHE}),
        ([], {"kv_transfer_config": 7}),
    ],
)
def test_what_names_no_such_connector_is_left_to_vllm(given, config):
    assert decide_by(transfer_config(given, config)).lane is ConnectorLane.INSIDE


HYBRIDS = [
    {"model_type": "qwen3_next"},
    {"model_type": "qwen3_5_moe", "text_config": {"model_type": "qwen3_5_moe_text"}},
    {"model_type": "nemotron_h", "hybrid_override_pattern": "M-M*-"},
    {"model_type": "nemotron_h", "layers_block_type": ["linear_attention", "mlp", "full_attention"]},
    {"model_type": "granitemoehybrid", "layer_types": ["mamba", "attention"]},
    {"model_type": "kimi_linear", "linear_attn_config": {"kda_layers": [1]}},
    {"model_type": "falcon_h1", "mamba_d_ssm": 1536, "num_attention_heads": 12},
]

OTHERS = [
    {},
    {"model_type": "llama", "num_attention_heads": 32},
    {"model_type": "gemma3", "text_config": {"layer_types": ["sliding_attention", "full_attention"]}},
    {"model_type": "granitemoehybrid", "layer_types": ["attention"], "mamba_d_conv": 4, "num_attention_heads": 32},
    {"model_type": "mamba2", "state_size": 128, "num_heads": 64},
    {"model_type": "nemotron_h", "hybrid_override_pattern": "M-M-"},
]


OFFLOADING = {"kv_connector": "OffloadingConnector", "kv_role": "kv_both"}


@pytest.mark.parametrize(
    "flags",
    [
        ["--kv-transfer-config", json.dumps(OFFLOADING)],
        ["--kv-transfer-config", json.dumps({"kv_connector": "SimpleCPUOffloadConnector"})],
        ["--kv-transfer-config", json.dumps(multi(PUSH, OFFLOADING))],
        ["--kv-offloading-size", "4"],
    ],
    ids=" ".join,
)
def test_what_copies_by_a_gpus_streams_is_not_started_on_a_cpu(flags, monkeypatch):
    monkeypatch.setattr(worker, "config_of", lambda _: HYBRIDS[0])
    said = refusal("m", flags, on_cpu=True)
    assert said is not None and "needs a GPU" in said and "--checkpoint-dir" in said
    assert refusal("m", flags) is None


def test_copies_of_ones_own_are_started_on_a_cpu(monkeypatch):
    monkeypatch.setattr(worker, "config_of", lambda _: HYBRIDS[0])
    own = OFFLOADING | {"kv_connector_extra_config": {"spec_module_path": "my.copies"}}
    assert refusal("m", ["--kv-transfer-config", json.dumps(own)], on_cpu=True) is None
    assert refusal("m", transfer_flags("/states"), on_cpu=True) is None


@pytest.mark.parametrize("config", OTHERS, ids=str)
def test_any_other_model_is_left_to_vllm(config, monkeypatch):
    assert not is_hybrid(config)
    monkeypatch.setattr(worker, "config_of", lambda _: config)
    assert refusal("m", ["--kv-transfer-config", json.dumps(LMCACHE)]) is None


DRAFTS = (
    ["--speculative-config", "{}"],
    ["--speculative-config.method=ngram"],
    ["-sc", "{}"],
    ["--spec-method", "mtp"],
)


@pytest.mark.parametrize("flags", DRAFTS, ids=" ".join)
def test_a_hybrid_that_drafts_is_not_started_on_a_cpu(flags, monkeypatch, capsys):
    monkeypatch.setattr(worker, "vllm_environment", lambda *_: {})
    served: list[Any] = []
    monkeypatch.setattr(worker, "serve", lambda arguments, port: served.append(arguments) or 0)
    for config, on_cpu in ((HYBRIDS[0], True), (OTHERS[0], True), (HYBRIDS[0], False)):
        monkeypatch.setattr(worker, "config_of", lambda _, config=config: config)
        monkeypatch.setattr(worker, "is_cpu_build", lambda on_cpu=on_cpu: on_cpu)
        assert worker.main(["m", *flags]) == (config is HYBRIDS[0] and on_cpu)
    (line,) = capsys.readouterr().err.splitlines()
    assert len(served) == 2 and "on a CPU vLLM drafts for no hybrid" in line


@pytest.mark.parametrize(("mode", "told"), [("0", True), ("reference", False), ("1", False)])
def test_vllm_untouched_on_a_cpu_is_started_with_a_word_of_its_defects(mode, told, monkeypatch, capsys):
    monkeypatch.setattr(worker, "config_of", lambda _: HYBRIDS[0])
    monkeypatch.setattr(worker, "is_cpu_build", lambda: True)
    monkeypatch.setattr(worker, "serve", lambda arguments, port: 0)
    monkeypatch.setattr(worker, "vllm_environment", lambda *_: {})
    monkeypatch.setenv("SEAMARK_ENGINE", mode)
    assert worker.main(["m"]) == worker.main(["m", "--no-enable-prefix-caching"]) == 0
    assert ["SEAMARK_ENGINE=reference" in line for line in capsys.readouterr().err.splitlines()] == [True] * told


def test_the_command_ends_before_vllm_is_started(monkeypatch, capsys, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(HYBRIDS[0]))
    monkeypatch.setattr(worker, "is_cpu_build", lambda: True)
    monkeypatch.setattr(worker, "vllm_environment", lambda *_: {})
    monkeypatch.setattr(worker, "serve", lambda _: pytest.fail("vLLM was started"))
    for line in ([], ["--explain"]):
        assert worker.main([str(tmp_path), "--kv-transfer-config", json.dumps(LMCACHE), *line]) == 1
        (said,) = capsys.readouterr().err.splitlines()
        assert said.startswith("seamark worker: LMCacheConnectorV1 knows caches of one kind only, and vLLM cannot")


def test_a_directory_for_checkpoints_is_our_connector_and_leaves_no_room_for_another(capsys):
    _, flags, config, _ = worker.read_command_line(["tiny", "--checkpoint-dir", "states", "--checkpoint-bytes", "7"])
    transfer = transfer_config(flags, config)
    assert decide_by(transfer) == Decision(ConnectorLane.INSIDE, ("SeamarkConnector",))
    (tier,) = transfer["kv_connector_extra_config"]["secondary_tiers"]
    assert tier["root_dir"] == str(Path("states").absolute()) and tier["max_bytes"] == 7
    with pytest.raises(SystemExit):
        worker.read_command_line(["tiny", "--checkpoint-dir", "states", "--kv-transfer-config", json.dumps(PULL)])
    assert "leave --kv-transfer-config away" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("transfer", "weights", "prefills"),
    [
        (None, False, False),
        ({"kv_connector": None}, False, False),
        (OWN, True, False),
        (PULL, True, True),
        (configured("NixlPullConnector"), True, True),
        (PUSH, False, False),
        (multi(PUSH, OFFLOADING), False, False),
        (multi(PUSH, OWN), True, False),
        (multi(OFFLOADING, multi(PUSH, PULL)), True, True),
    ],
    ids=str,
)
def test_weights_are_asked_for_where_states_come_from_elsewhere(transfer, weights, prefills):
    config = SimpleNamespace(kv_transfer_config=None if transfer is None else SimpleNamespace(**transfer))
    assert kv_connectors.needs_weights(config) is weights
    assert kv_connectors.hands_prefills_over(config) is prefills


@pytest.mark.parametrize("fits", [True, False])
def test_a_nixl_that_hands_prefills_over_otherwise_is_known(monkeypatch, fits):
    checked: list[int] = []

    class Looked:
        def __init__(self, number: int) -> None:
            self.number = number

        def check(self) -> None:
            checked.append(self.number)
            if self.number == 2 and not fits:
                raise ShapeMismatch("another one")

    monkeypatch.setattr(kv_connectors, "_HANDED_OVER", tuple(map(Looked, range(1, 4))))
    assert kv_connectors.hands_over() is fits and checked == ([1, 2, 3] if fits else [1, 2])
    monkeypatch.setattr(kv_connectors, "_SHOWN", ())
    lane = decide_by(PULL).lane
    assert lane is (ConnectorLane.INSIDE if fits else ConnectorLane.CHUNK_ENDS)


@pytest.mark.parametrize(("device", "lane"), [("cpu", ConnectorLane.INSIDE), ("cuda", ConnectorLane.CHUNK_ENDS)])
def test_a_configurations_device_is_its_own(device, lane):
    buffered = SimpleNamespace(**configured("NixlConnector", kv_buffer_device="cpu"))
    config = SimpleNamespace(kv_transfer_config=buffered, device_config=SimpleNamespace(device_type=device))
    assert kv_connectors.decide(config).lane is lane
    assert decide_by(vars(buffered)).lane is ConnectorLane.INSIDE, "by default on a CPU"
