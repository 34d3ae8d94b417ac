"""The table of KV connectors agrees with vLLM's own classes and configurations."""

from __future__ import annotations

import importlib.util
import inspect
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1 import supports_hma

from engine_patches.kv_connectors import CONNECTORS, WITHOUT, ConnectorLane, decide

REGISTERED = KVConnectorFactory._registry


def serves_hybrids(name: str) -> bool:
    """Whether a connector's class takes caches of several kinds, by its source if it needs what is not installed."""
    try:
        return supports_hma(KVConnectorFactory.get_connector_class_by_name(name))
    except (ImportError, AttributeError, RuntimeError):
        names = inspect.getclosurevars(REGISTERED[name]).nonlocals
        source = Path(importlib.util.find_spec(names["module_path"]).origin).read_text()
        # vLLM's own LMCacheMPConnector has another name, since LMCache may bring one.
        (bases,) = re.findall(rf"^class {names['class_name']}(?:Upstream)?\(([^)]*)\):", source, re.MULTILINE)
        return "SupportsHMA" in bases


@pytest.mark.parametrize("name", REGISTERED)
def test_vllm_serves_hybrids_through_a_connector_just_if_the_table_says_so(name):
    assert serves_hybrids(name) == (CONNECTORS.get(name) is not ConnectorLane.NOT_SERVED)


def test_the_table_names_connectors_that_vllm_has():
    assert CONNECTORS.keys() <= REGISTERED.keys()


def of(transfer: KVTransferConfig | None, device: str = "cpu") -> SimpleNamespace:
    """What is read of a `VllmConfig`."""
    return SimpleNamespace(kv_transfer_config=transfer, device_config=SimpleNamespace(device_type=device))


def test_vllms_own_configuration_is_read():
    assert decide(of(None)) == WITHOUT
    nixl = KVTransferConfig(kv_connector="NixlConnector", kv_role="kv_consumer")
    assert decide(of(nixl)) == (ConnectorLane.INSIDE, ("NixlConnector",), "")
    assert nixl.kv_buffer_device == "cpu" and decide(of(nixl, "cuda")).lane is ConnectorLane.CHUNK_ENDS
    children = [{"kv_connector": name, "kv_role": "kv_both"} for name in ("NixlConnector", "OffloadingConnector")]
    several = KVTransferConfig(
        kv_connector="MultiConnector", kv_role="kv_both", kv_connector_extra_config={"connectors": children}
    )
    decision = decide(of(several))
    assert decision.lane is ConnectorLane.CHUNK_ENDS and decision.names == ("NixlConnector", "OffloadingConnector")
