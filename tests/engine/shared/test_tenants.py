"""Two keys with equal prompts never share a hit, two that are configured to share do: on a real engine."""

from __future__ import annotations

from proxy.bench.harness.servers import Servers
from tests.bench.tenants import measure, write_keys
from tests.harness.engines import SharedServers


def test_strangers_never_share_a_hit_and_those_who_share_do(servers: SharedServers, tmp_path):
    write_keys(tmp_path / "keys.toml")
    with Servers(tmp_path) as fleet:
        gateway = fleet.gateway(servers.seamark, flags=("--api-keys", str(tmp_path / "keys.toml")))
        gateway.wait_until_ready("/ready", seconds=30)
        rounds = measure(gateway, 3, words=300, seed=77_000)
    assert [(each.owner.cached_tokens, each.stranger.cached_tokens) for each in rounds] == [(0, 0)] * 3
    assert [each.unseen.cached_tokens for each in rounds] == [0] * 3
    assert all(each.sharer.cached_tokens > 300 for each in rounds)
