"""The table of KV connectors agrees with vLLM's own classes and configurations."""

from __future__ import annotations

from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

from engine_patches.kv_connectors import CONNECTORS

REGISTERED = KVConnectorFactory._registry


def test_the_table_names_connectors_that_vllm_has():
    assert CONNECTORS.keys() <= REGISTERED.keys()
