"""Two keys with equal prompts never share a hit, two that are configured to share do: on a real engine."""

from __future__ import annotations

import httpx

from proxy.bench.harness.prompts import prose
from proxy.bench.harness.servers import MODEL_NAME, Servers
from tests.harness.api_keys import bearer, entry
from tests.harness.engines import SharedServers
from tests.harness.gateways import CHAT

WORDS = 300  # of a system prompt


def test_strangers_never_share_a_hit_and_those_who_share_do(servers: SharedServers, tmp_path):
    keys = tmp_path / "keys.toml"
    keys.write_text(entry("owner", share="team") + entry("sharer", share="team") + entry("stranger"))
    with Servers(tmp_path) as fleet, httpx.Client(timeout=300) as client:
        gateway = fleet.gateway(servers.seamark, flags=("--api-keys", str(keys)))
        gateway.wait_until_ready("/ready", seconds=30)

        def cached(name: str, system: str) -> int:
            messages = [{"role": "system", "content": system}, {"role": "user", "content": f"{name}?"}]
            body = {"model": MODEL_NAME, "messages": messages, "max_tokens": 1}
            answer = client.post(gateway.url + CHAT, json=body, headers=bearer(name)).raise_for_status()
            return int(answer.headers["x-seamark-cached"])

        for number in range(3):
            system = prose(WORDS, 77_000 + number)
            assert cached("owner", system) == 0
            assert cached("stranger", system) == 0
            assert cached("sharer", system) > WORDS
