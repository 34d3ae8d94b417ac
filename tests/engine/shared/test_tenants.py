"""Keys on a real engine: who shares hits, and whose exact repeats the response cache answers as the engine did."""

from __future__ import annotations

import asyncio
import json
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import httpx

from proxy.bench.harness.client import prose
from proxy.bench.harness.servers import MODEL_NAME
from tests.harness.api_keys import bearer, entry
from tests.harness.engines import SharedServers
from tests.harness.gateways import CHAT, own_gateway
from tests.harness.waiting import wait_for

GROUPS = {"ann": "ann", "bob": "team", "cleo": "team"}

HEADER = "x-seamark-cache"

REPEATS = 3


def body_of(number: int) -> dict[str, Any]:
    """Whole and streamed, greedy and seeded."""
    body: dict[str, Any] = {"model": MODEL_NAME, "max_tokens": 8, "stream": number % 2 == 1}
    body |= {"temperature": 1.0, "seed": number} if number % 3 == 2 else {"temperature": 0}
    return body | {"messages": [{"role": "user", "content": f"Ship {number} waits in the roads. When may it enter?"}]}


def said(answer: httpx.Response) -> str:
    parts = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")] or [answer.json()]
    choices = [choice for part in parts for choice in part["choices"]]
    return "".join((choice.get("delta") or choice["message"]).get("content") or "" for choice in choices)


def test_strangers_never_share_a_hit_and_those_who_share_do(servers: SharedServers, tmp_path: Path):
    keys = tmp_path / "keys.toml"
    team = entry("owner", share="team") + entry("sharer", share="team")
    keys.write_text(team + entry("stranger") + entry("root", admin=True))
    with own_gateway(servers.seamark, api_keys=keys) as own:

        def cached(name: str, system: str) -> int:
            messages = [{"role": "system", "content": system}, {"role": "user", "content": f"{name}?"}]
            body = {"model": MODEL_NAME, "messages": messages, "max_tokens": 1}
            answer = httpx.post(own.url + CHAT, json=body, headers=bearer(name), timeout=300).raise_for_status()
            return int(answer.headers["x-seamark-cached"])

        def knows_templates() -> bool:
            status = httpx.get(own.url + "/seamark/status", headers=bearer("root")).json()
            templates = [each for worker in status["workers"] for each in worker["templates"].values()]
            return bool(templates) and all(each["learnt"] for each in templates)

        wait_for(knows_templates)
        for number in range(3):
            system = prose(1000, 77_000 + number)
            assert cached("owner", system) == cached("stranger", system) == 0
            assert cached("sharer", system) > 1000


async def test_a_mix_of_repeats_gets_the_engines_own_answers(servers: SharedServers, tmp_path: Path):
    keys = tmp_path / "keys.toml"
    keys.write_text(entry("ann") + entry("bob", share="team") + entry("cleo", share="team"))
    results: Counter[str] = Counter()
    contents: dict[tuple[str, int], set[bytes]] = defaultdict(set)
    answers: dict[int, str] = {}
    with own_gateway(servers.seamark, response_cache=2**21, api_keys=keys) as own:
        async with httpx.AsyncClient(timeout=300) as http:

            async def ask(name: str, number: int) -> None:
                headers = {HEADER: "allow", **bearer(name)}
                answer = (await http.post(own.url + CHAT, json=body_of(number), headers=headers)).raise_for_status()
                results[answer.headers[HEADER]] += 1
                contents[GROUPS[name], number].add(answer.content)
                answers[number] = said(answer)

            for _ in range(REPEATS):
                await asyncio.gather(*(ask(name, number) for number in range(6) for name in (*GROUPS, *GROUPS)))
            for number, text in answers.items():
                plain = await http.post(servers.gateway.url + CHAT, json=body_of(number))
                assert said(plain) == text, number
    assert results["miss"] == len(contents) == 12 and results["hit"] and results["joined"]
    assert all(len(each) == 1 for each in contents.values())  # bytes, ids and times included
    # Each group has answers of its own, with ids of their own.
    assert len({content for each in contents.values() for content in each}) == len(contents)
