"""Over a grid of shared and own lengths the second prompt hits all that a match unit allows."""

from __future__ import annotations

from proxy.bench.harness.client import open_client
from proxy.bench.stories import floored
from proxy.fleet import worker_metrics
from tests.harness.cells import OWN, SHARED, chat_cells, token_cells
from tests.harness.engines import SharedServers


async def test_every_shared_token_of_a_whole_match_unit_is_delivered_and_without_hints_much_is_not(
    servers: SharedServers,
):
    worker = servers.seamark.url
    async with open_client(300) as client:
        engine = worker_metrics.read((await client.get(worker + "/metrics")).text).engine
        assert engine is not None and (engine.block_size, engine.match_unit) == (384, 16)
        chats = await chat_cells(client, servers.gateway.url, worker)
        hinted, bare = [await token_cells(client, worker, hinted=hinted) for hinted in (True, False)]
    for cells in (chats, hinted):
        assert len(cells) == len(SHARED) * len(OWN)
        assert [cell.delivered for cell in cells] == [floored(cell.shared) for cell in cells]
    assert all(abs(cell.shared - cell.wanted) <= 4 for cell in chats)
    # The same engine and lengths: the instrument tells a hinted request from one that is not.
    assert sum(cell.delivered for cell in bare) < 0.8 * sum(floored(cell.shared) for cell in bare)
