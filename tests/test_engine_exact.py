"""On real engines: hits, and answers equal to those of an engine that caches nothing."""

from __future__ import annotations

import random
from collections.abc import Sequence

import httpx
import pytest

from proxy.bench import exact, stories
from proxy.bench.client import Answer, Messages, ask, ask_all, tokens_of
from proxy.bench.engines import Server
from proxy.bench.passes import PassCounter
from proxy.bench.prompts import prose, with_shared_tokens
from proxy.bench.stories import Told, floored
from tests.conftest import Servers

CHATS = 60
SYSTEM_PROMPTS = 5
PARALLEL = 8


def random_chats(seed: int) -> list[Messages]:
    """Chats of 1 to 3 turns on a few system prompts, of lengths from a line to several cache blocks."""
    draw = random.Random(seed)
    systems = [prose(draw.choice((20, 70, 150, 400, 700)), seed + number) for number in range(SYSTEM_PROMPTS)]
    chats = []
    for number in range(CHATS):
        messages = [{"role": "system", "content": draw.choice(systems)}]
        for turn in range(draw.randint(1, 3)):
            if turn:
                messages.append({"role": "assistant", "content": prose(draw.randint(3, 80), seed + draw.randint(0, 9))})
            text = f"{draw.choice('ABCDEFGH')}{number}: {prose(draw.choice((4, 15, 60, 200)), seed + number + turn)}"
            messages.append({"role": "user", "content": text})
        chats.append(messages)
    return chats


async def metric(client: httpx.AsyncClient, server: Server, name: str) -> float:
    lines = (await client.get(server.url + "/metrics")).text.splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name) and not line.startswith("#"))


def assert_exact(answers: Sequence[Answer], right: Sequence[Answer]) -> None:
    differing = [
        (number, difference)
        for number, (answer, wanted) in enumerate(zip(answers, right, strict=True))
        if not (difference := exact.compare(answer, wanted)).exact or len(answer.steps) < exact.MIN_TOKENS
    ]
    assert not differing


@pytest.fixture
async def client():
    async with httpx.AsyncClient(timeout=300) as opened:
        yield opened


@pytest.mark.parametrize(
    ("room", "shares"),
    [
        ("room", (0.3, 0.9)),  # the second round finds nearly all of the first
        ("64 blocks and 320 tokens per step", (0.1, 0.1)),  # constant eviction
    ],
)
async def test_sixty_random_chats_two_rounds_hit_and_are_exact(client, servers: Servers, room, shares):
    engine, gateway = (servers.seamark, servers.gateway) if room == "room" else (servers.tight, servers.tight_gateway)
    chats = random_chats(seed=7)
    right = await ask_all(client, servers.reference.url, chats, exact.MIN_TOKENS, PARALLEL)
    hits_before = await metric(client, engine, "seamark_checkpoint_hits_total")
    for round_number in (1, 2):
        answers = await ask_all(client, gateway.url, chats, exact.MIN_TOKENS, PARALLEL)
        assert_exact(answers, right)
        prompt, cached = (
            sum(values) for values in zip(*((a.prompt_tokens, a.cached_tokens) for a in answers), strict=True)
        )
        print(f"{room}, round {round_number}: {cached} of {prompt} prompt tokens cached")
        assert cached > shares[round_number - 1] * prompt
    assert await metric(client, engine, "seamark_checkpoint_hits_total") > hits_before + CHATS
    assert await metric(client, engine, 'seamark_checkpoints_written_total{kind="hinted"}') > 0
    assert await metric(client, gateway, 'seamark_miss_total{model="tiny-hybrid",reason="render_failed"}') == 0


async def test_the_second_request_hits_at_the_seam_and_in_another_process_too(client, servers):
    shared = await with_shared_tokens(client, servers.reference.url, 163, seed=101)
    right = await ask_all(client, servers.reference.url, shared.prompts[:3], exact.MIN_TOKENS, 3)
    answers = [await ask(client, servers.gateway.url, prompt, exact.MIN_TOKENS) for prompt in shared.prompts[:3]]
    assert [answer.cached_tokens for answer in answers] == [0, 160, 160]
    assert_exact(answers, right)


async def test_a_cold_fan_out_shares_one_prefill(client, servers):
    shared = await with_shared_tokens(client, servers.reference.url, 163, seed=102, questions=stories.SECTIONS)
    right = await ask_all(client, servers.reference.url, shared.prompts, exact.MIN_TOKENS, 4)
    answers = await ask_all(client, servers.gateway.url, shared.prompts, exact.MIN_TOKENS, 4)
    assert max(answer.sent for answer in answers) < min(answer.first_token for answer in answers)
    assert sorted(answer.cached_tokens for answer in answers) == [0, 160, 160, 160]
    assert_exact(answers, right)


async def test_hints_of_several_positions_are_all_kept(client, servers):
    """One request writes three states; three later ones, sharing less and less, find them."""
    prompt = await tokens_of(client, servers.reference.url, [{"role": "user", "content": prose(500, 103)}])
    await complete(client, servers.seamark, prompt, [100, 400, 700])
    for shared, hit in ((110, 96), (500, 400), (720, 688)):
        other = [*prompt[:shared], *reversed(prompt[:60])]
        answer = await complete(client, servers.seamark, other, None)
        assert answer.cached_tokens == hit
        assert exact.compare(answer, await complete(client, servers.reference, other, None)).exact


@pytest.mark.parametrize("edge", [-1, 0, 1])
@pytest.mark.parametrize("length", [160, 384, 768])
async def test_prompts_that_end_around_a_boundary_and_a_block_edge(client, servers, length, edge):
    prompt = await tokens_of(
        client, servers.reference.url, [{"role": "user", "content": prose(600, 104 + length + edge)}]
    )
    ends = [*prompt[: length + edge]]
    await complete(client, servers.seamark, ends, [length])
    for again in (ends, [*ends, *prompt[:30]]):
        answer = await complete(client, servers.seamark, again, [length])
        assert answer.cached_tokens >= floored(length - 2) - 16
        assert exact.compare(answer, await complete(client, servers.reference, again, None)).exact


async def test_bad_hints_change_no_answer_and_are_counted(client, servers):
    prompt = await tokens_of(client, servers.reference.url, [{"role": "user", "content": prose(60, 105)}])
    right = await complete(client, servers.reference, prompt, None)
    before = await metric(client, servers.seamark, "seamark_hints_ignored_total")
    for hint in ([-16], [0], [10**9], [64, 32], ["64"], [3]):
        assert exact.compare(await complete(client, servers.seamark, prompt, hint), right).exact
    assert await metric(client, servers.seamark, "seamark_hints_ignored_total") == before + 6


async def test_two_salts_never_share(client, servers):
    shared = await with_shared_tokens(client, servers.reference.url, 163, seed=106)
    for salt, expected in (("one", 0), ("two", 0), ("one", 160)):
        prompt = shared.prompts[("one", "two").index(salt) + expected // 80]
        answer = await ask(client, servers.gateway.url, prompt, exact.MIN_TOKENS, cache_salt=salt)
        assert answer.cached_tokens == expected


async def test_requests_without_a_hint_are_split_as_vllm_splits_them(client, servers):
    """A cold prompt takes the same passes with the plugin as an engine without checkpoints at the same match unit."""
    prompt = await tokens_of(client, servers.reference.url, [{"role": "user", "content": prose(70, 107)}])
    counter = PassCounter(servers.seamark.log)
    answer = await complete(client, servers.seamark, prompt, None)
    assert counter.after([answer]).with_prompt == 2  # up to vLLM's own stop before the end, and the rest


async def test_the_exactness_check_notices_planted_defects(client, servers):
    told = Told(client, servers.reference.url, (), seed=5000)
    defects = await stories.planted_defects(told, servers.seamark.url, servers.planted)
    assert {defect.defect: defect.caught for defect in defects} == {
        "none": False,
        "another prefix's state": True,
        "a state one unit early": True,
        "the copy cure off": True,
    }


async def test_states_are_counted_in_bytes(client, servers):
    assert await metric(client, servers.seamark, "seamark_checkpoint_bytes") > 0


async def complete(client, server: Server, prompt: Sequence[int], hint: object) -> Answer:
    """A completion of token ids with a hint of the test's own."""
    fields = {} if hint is None else {"vllm_xargs": {"seamark_boundaries": hint}}
    return await stories.complete(client, server.url, prompt, **fields)
