"""A hint in a header, on a real engine: it does what the same hint in the body does, and only for a trusted hop."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import httpx
import pytest

from proxy.bench.harness import exact
from proxy.bench.harness.client import complete
from proxy.bench.harness.servers import MATCH_UNITS
from proxy.bench.stories import floored
from tests.harness.bench_clients import fresh_tokens
from tests.harness.counters import samples_of
from tests.harness.engines import TRUSTED_HOP, SharedServers

HEADER = "x-seamark-boundaries"

CLIENT = "127.0.0.1"

RESULTS = ("used", "in_body", "untrusted", "malformed")


def pair(shared: int, seed: int) -> list[list[int]]:
    """Two prompts that have so many tokens in common."""
    head = fresh_tokens(shared, "hint header", shared, seed)
    return [[*head, end, *fresh_tokens(20, seed, end)] for end in (20, 21)]


async def cached(
    servers: SharedServers, prompts: Sequence[Sequence[int]], address: str, header: Mapping[str, str], **fields: object
) -> list[int | None]:
    """Tokens from the cache, by prompt; the answers are those of an engine that caches nothing."""
    found = []
    hop = httpx.AsyncHTTPTransport(local_address=address)
    async with httpx.AsyncClient(transport=hop, headers=header, timeout=300) as client:
        for prompt in prompts:
            answer = await complete(client, servers.seamark.url, prompt, **fields)
            right = await complete(client, servers.reference.url, prompt)
            assert exact.compare(answer, right).exact
            found.append(answer.cached_tokens)
    return found


UNHINTED = 128  # tokens of 163 that a prompt may find of one that named no place: its end leaves states, too


async def counted(servers: SharedServers) -> Counter[str]:
    """Requests with a hint in a header, by what became of them."""
    async with httpx.AsyncClient() as client:
        samples = await samples_of(client, servers.seamark)
    name = "seamark_hint_headers_total"
    return Counter({each: int(samples.get(f'{name}{{result="{each}"}}', 0)) for each in RESULTS})


@pytest.mark.parametrize("shared", [163, 1037])
async def test_a_trusted_hops_header_hits_as_the_body_does(servers, family, shared):
    before = await counted(servers)
    in_header = await cached(servers, pair(shared, 1), TRUSTED_HOP, {HEADER: str(shared)})
    in_body = await cached(servers, pair(shared, 2), CLIENT, {}, vllm_xargs={"seamark_boundaries": [shared]})
    assert in_header == in_body == [0, floored(shared, MATCH_UNITS[family])]
    assert await counted(servers) - before == Counter(used=2)


@pytest.mark.parametrize(
    ("address", "header", "result"),
    [(CLIENT, "163", "untrusted"), (TRUSTED_HOP, "163;nonsense", "malformed"), (TRUSTED_HOP, ";" * 40, "malformed")],
)
async def test_a_header_that_is_not_to_be_heard_is_counted_and_does_nothing(servers, address, header, result):
    before = await counted(servers)
    prompts = pair(163, 3 + len(header) + len(address))
    first, second = await cached(servers, prompts, address, {HEADER: header})
    assert first == 0 and second <= UNHINTED
    assert await counted(servers) - before == Counter({result: 2})


async def test_a_client_of_the_gateway_cannot_pass_one_on(servers):
    before = await counted(servers)
    async with httpx.AsyncClient(headers={HEADER: "163"}, timeout=300) as client:
        for prompt in pair(163, 4):
            assert (await complete(client, servers.gateway.url, prompt)).cached_tokens <= UNHINTED
    assert await counted(servers) == before
