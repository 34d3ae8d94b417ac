"""Beside which KV connectors states are written inside a pass, and what is said of the others."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from engine_patches import kv_connectors
from engine_patches.commands.explain import about
from engine_patches.kv_connectors import CONNECTORS, UNKNOWN, ConnectorLane, decide_by
from engine_patches.ledger import Shape, ShapeMismatch


def configured(name: str, **more: Any) -> dict[str, Any]:
    """Fields of vLLM's `KVTransferConfig`."""
    extra = {key: more.pop(key) for key in ("connectors", "bidirectional_kv_xfer") if key in more}
    return {"kv_connector": name, "kv_role": "kv_both", "kv_connector_extra_config": extra, **more}


def multi(*children: dict[str, Any]) -> dict[str, Any]:
    return configured("MultiConnector", connectors=list(children))


OWN = configured("SeamarkConnector", kv_connector_module_path="engine_patches.disk.connector")

PULL, PUSH, OFFLOADING = (configured(name) for name in ("NixlConnector", "NixlPushConnector", "OffloadingConnector"))

LENT = "NixlConnector with bidirectional_kv_xfer"


@pytest.mark.parametrize(
    ("transfer", "named"),
    [
        *((each, "") for each in ({}, OWN, PULL, configured("NixlPullConnector"), multi(OWN, PULL))),
        (OFFLOADING, "OffloadingConnector"),
        (configured("OfSomebody"), "OfSomebody"),
        (configured("SeamarkConnector", kv_connector_module_path="my.connectors"), "SeamarkConnector"),
        (configured("NixlConnector", kv_connector_module_path="my.connectors"), "NixlConnector"),
        (configured("MultiConnector"), "MultiConnector"),
        (configured("MultiConnector", connectors=[PULL], kv_connector_module_path="my"), "MultiConnector"),
        (configured("NixlConnector", bidirectional_kv_xfer=True), LENT),
        (multi(PULL, multi(PULL, PUSH)), "NixlPushConnector"),
    ],
)
def test_a_connector_that_is_not_known_to_leave_their_blocks_alone_costs_passes_and_is_named(transfer, named):
    decision = decide_by(transfer)
    if not named:
        assert decision.lane is ConnectorLane.INSIDE and not decision.reason and not list(about(decision))
        return
    assert decision.lane is ConnectorLane.CHUNK_ENDS and decision.reason == f"{named} {UNKNOWN}"
    (line,) = about(decision)
    assert named in line and "a state costs a pass" in line


@pytest.mark.parametrize("name", CONNECTORS)
def test_the_worst_of_several_connectors_counts(name):
    for transfer in (configured(name), multi(PULL, configured(name), OWN)):
        decision = decide_by(transfer)
        assert decision.lane is CONNECTORS[name] and name in decision.names
        if decision.lane is ConnectorLane.NOT_SERVED:
            assert decision.reason.startswith(f"{name} knows caches of one kind")
            assert list(about(decision)) == [decision.reason]
    assert decide_by(multi(configured("ExampleConnector"), configured("DecodeBenchConnector"))).names == (
        "ExampleConnector",
        "DecodeBenchConnector",
    )


@pytest.mark.parametrize(("device", "lane"), [("cpu", ConnectorLane.INSIDE), ("cuda", ConnectorLane.CHUNK_ENDS)])
def test_a_buffer_in_the_hosts_memory_is_one_only_beside_a_gpu(device, lane):
    buffered = configured("NixlConnector", kv_buffer_device="cpu")
    config = SimpleNamespace(
        kv_transfer_config=SimpleNamespace(**buffered), device_config=SimpleNamespace(device_type=device)
    )
    assert kv_connectors.decide(config).lane is lane
    assert decide_by(buffered).lane is ConnectorLane.INSIDE, "by default on a CPU"
    assert decide_by({**buffered, "kv_buffer_device": "cuda"}, on_cpu=False).lane is ConnectorLane.INSIDE


def test_a_nixl_that_was_not_shown_costs_passes_and_the_difference_is_named(monkeypatch):
    fits, other = kv_connectors._SHOWN[0], Shape(kv_connectors._SHOWN[0].target, "self, request")
    for name, is_handed_over in (("_SHOWN", True), ("_HANDED_OVER", False)):
        with monkeypatch.context() as patched:
            patched.setattr(kv_connectors, name, (fits, other))
            decision = decide_by(PULL)
            assert decision.lane is ConnectorLane.CHUNK_ENDS and "expected (self, request)" in decision.reason
            assert kv_connectors.hands_over() is is_handed_over
    with pytest.raises(ShapeMismatch):
        other.check()
    assert decide_by({}).lane is ConnectorLane.INSIDE


@pytest.mark.parametrize(
    ("transfer", "weights", "prefills"),
    [
        (None, False, False),
        (OWN, True, False),
        (PULL, True, True),
        (multi(PUSH, OFFLOADING), False, False),
        (multi(OFFLOADING, multi(PUSH, PULL)), True, True),
    ],
)
def test_weights_are_asked_for_where_states_come_from_elsewhere(transfer, weights, prefills):
    config = SimpleNamespace(kv_transfer_config=None if transfer is None else SimpleNamespace(**transfer))
    assert kv_connectors.needs_weights(config) is weights
    assert kv_connectors.hands_prefills_over(config) is prefills
