"""`seamark bench grid`: what it measures on real engines."""

from __future__ import annotations

from dataclasses import replace

from proxy.bench import grid
from proxy.bench.cells import QUICK, CellFamily, measure_baseline, measure_seamark
from proxy.bench.harness.client import open_client
from tests.harness.engines import SharedServers


async def test_seamark_gives_the_oracle_hit_in_every_cell_and_without_hints_the_grid_shows_it(servers: SharedServers):
    async with open_client(300) as client:
        engine, ours = await measure_seamark(client, servers.gateway.url, servers.seamark.url, QUICK)
        bare = await measure_baseline(client, "no hints", servers.seamark.url, QUICK, ())
    assert (engine.block_size, engine.match_unit) == (384, 16)
    for mode in ours:
        assert len(mode.cells) == len(QUICK.grid)
        assert [cell.delivered for cell in mode.cells] == [cell.oracle for cell in mode.cells]
        assert all(abs(cell.shared - cell.wanted.shared) <= 4 for cell in mode.cells)
    by_hand = ours[1]
    assert all((cell.shared, cell.own) == cell.wanted for cell in by_hand.cells)
    # The same engine and lengths: the instrument tells a hinted request from one that is not.
    assert bare.efficiency < 0.8 and bare.worst.delivered == 0
    unhinted = CellFamily("nemotron_h", engine.block_size, QUICK, (*ours, replace(bare, ours=True)), 0.0)
    assert [complaint.split(":")[0] for complaint in grid.complaints(unhinted)] == ["nemotron_h, no hints"]
