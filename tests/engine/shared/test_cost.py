"""`seamark bench passes`: forward passes counted on real engines."""

from __future__ import annotations

from proxy.bench import passes
from proxy.bench.harness.client import open_client
from proxy.bench.passes import AT_ONCE, BASELINE, OURS, UNTOUCHED, PassPlan, Row, Table, count
from tests.harness.engines import SharedServers


async def test_seamark_takes_no_more_passes_than_vllm_alone(servers: SharedServers):
    plan = PassPlan((130, 163), (120,), waves=3, running=0)
    async with open_client(300) as client:
        counts = {
            OURS: await count(client, servers.seamark, plan),
            UNTOUCHED: await count(client, servers.untouched, plan),
        }
    table = Table("nemotron_h", 384, counts)
    assert len(counts[OURS]) == 14  # three requests of two lengths and a wave, hinted and not
    for row, counted_passes in counts[OURS].items():
        if row.request == AT_ONCE:
            assert counted_passes >= passes.FAN_OUT_TOKENS  # whether four arrive together is the machine's affair
        else:
            assert counted_passes == 1 and table.held(row), (row, table.others(row))


def counted(ours: float, alone: float) -> Table:
    """A made-up table of two rows; only the first is short enough for the untouched engine."""
    short, long = Row("cold", True, 130, 120), Row("cold", True, 6000, 120)
    return Table(
        "nemotron_h", 384, {OURS: {short: 1, long: ours}, BASELINE: {short: 2, long: alone}, UNTOUCHED: {short: 1}}
    )
