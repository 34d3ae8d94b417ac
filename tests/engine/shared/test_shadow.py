"""Shadow mode before vLLM as it is."""

from __future__ import annotations

import uuid

import httpx

from proxy.bench.harness.servers import MODEL_NAME
from proxy.observability.shadow import MATCH_UNIT
from tests.harness.engines import SharedServers
from tests.harness.gateways import CHAT
from tests.harness.waiting import wait_for


def test_on_an_untouched_engine_the_loss_is_what_requests_shared(servers: SharedServers):
    """vLLM as it is hits nothing shorter than a block of 384 tokens: everything shared is lost, to the unit."""
    gateway = servers.untouched_gateway
    system = f"{uuid.uuid4().hex} " + "You name the tide before you name the berth. " * 12
    ids, shared = [], []
    with httpx.Client(timeout=120) as client:
        for question in ("High tide?", "And low?", "Which berth?"):
            messages = [{"role": "system", "content": system}, {"role": "user", "content": question}]
            body = {"model": MODEL_NAME, "messages": messages, "max_tokens": 1}
            answer = client.post(gateway.url + CHAT, json=body)
            assert answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
            ids.append(answer.headers["x-request-id"])
            shared.append(client.post(servers.untouched.url + "/tokenize", json=body).json()["tokens"])
        wait_for(lambda: client.get(f"{gateway.url}/seamark/requests/{ids[-1]}").json()["lost"] is not None)
        lost = [client.get(f"{gateway.url}/seamark/requests/{each}").json()["lost"] for each in ids]
    common = next(at for at, three in enumerate(zip(*shared, strict=False)) if len(set(three)) > 1)
    assert lost[0] == {}
    assert lost[1] == lost[2] == {"unpatched": common // MATCH_UNIT * MATCH_UNIT}
