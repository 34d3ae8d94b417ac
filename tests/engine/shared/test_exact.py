"""On real engines: hits, and answers equal to those of an engine that caches nothing.

`pytest tests/engine/shared/test_exact.py --family qwen3_next` runs it on gated delta nets instead of Mamba2,
their kernels replaced by formulas in float32.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import re
from collections.abc import Sequence

import pytest

from proxy.bench import stories
from proxy.bench.harness import exact
from proxy.bench.harness.client import (
    MIN_TOKENS,
    QUESTIONS,
    Messages,
    PassCounter,
    TimedAnswer,
    ask,
    ask_all,
    open_client,
    prose,
    tokens_of,
    with_shared_tokens,
)
from proxy.bench.harness.client import complete as completion
from proxy.bench.harness.servers import MATCH_UNITS, MODEL_NAME, Server
from proxy.bench.shapes import SHAPES, Seen
from proxy.bench.stories import StoryStage, floored
from tests.harness.bench_clients import fresh_tokens
from tests.harness.counters import samples_of
from tests.harness.engines import SharedServers
from tests.harness.gateways import metric

CHATS = 60

SYSTEM_PROMPTS = 5

PARALLEL = 8

# Tokens of pairs of prompts: enough for their state to be worth its time on an engine that is slow or busy.
SHARED, OWN = (163, 300, 469, 1200), (5, 75, 600)


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


def check_exact(answers: TimedAnswer | Sequence[TimedAnswer], right: TimedAnswer | Sequence[TimedAnswer]) -> None:
    """Raise `AssertionError` where answers are not the right ones."""
    if isinstance(answers, TimedAnswer):
        answers, right = [answers], [right]
    found = [exact.compare(answer, wanted) for answer, wanted in zip(answers, right, strict=True)]
    assert all(len(answer.steps) == len(wanted.steps) for answer, wanted in zip(answers, right, strict=True))
    assert not [(number, each) for number, each in enumerate(found) if not each.exact]


@pytest.fixture(scope="module")
def unit(family: str) -> int:
    """Match unit, tokens."""
    return MATCH_UNITS[family]


@pytest.fixture
async def block(client, servers: SharedServers) -> int:
    """Cache block, tokens."""
    found = await samples_of(client, servers.seamark)
    (size,) = filter(None, (re.fullmatch(r'seamark_engine_info\{block_size="(\d+)"\}', name) for name in found))
    return int(size[1])


@pytest.fixture
async def client():
    async with open_client(300) as opened:
        yield opened


@pytest.mark.parametrize(
    ("room", "shares"),
    [
        # The second round finds nearly all of the first.
        pytest.param("room", (0.3, 0.9), marks=pytest.mark.thorough),
        ("64 blocks and 320 tokens per step", (0.1, 0.1)),  # constant eviction
    ],
)
async def test_sixty_random_chats_two_rounds_hit_and_are_exact(client, servers: SharedServers, room, shares):
    engine, gateway = (servers.seamark, servers.gateway) if room == "room" else (servers.tight, servers.tight_gateway)
    chats = random_chats(seed=7)
    right = await ask_all(client, servers.reference.url, chats, MIN_TOKENS, PARALLEL)
    hits_before = metric(engine, "seamark_checkpoint_hits_total")
    for round_number in (1, 2):
        answers = await ask_all(client, gateway.url, chats, MIN_TOKENS, PARALLEL)
        check_exact(answers, right)
        prompt, cached = (
            sum(values) for values in zip(*((a.prompt_tokens, a.cached_tokens) for a in answers), strict=True)
        )
        print(f"{room}, round {round_number}: {cached} of {prompt} prompt tokens cached")
        assert cached > shares[round_number - 1] * prompt
    assert metric(engine, "seamark_checkpoint_hits_total") > hits_before + CHATS // 4
    assert metric(engine, 'seamark_checkpoints_written_total{kind="hinted"}') > 0
    assert metric(gateway, 'seamark_miss_total{model="tiny-hybrid",reason="no_facts"}') == 0


@pytest.mark.thorough
async def test_every_way_to_share_a_text_is_exact_on_rungs_and_with_hints(client, servers):
    """Those that `bench mine` asks, of the engine alone and then through the gateway, which finds them all again."""
    rungs = 'seamark_checkpoints_written_total{kind="rung"}'
    before, draw, seen = metric(servers.seamark, rungs), random.Random(12), Seen()
    for shape in SHAPES:
        document = prose(700, draw.randrange(1000))
        for wave in shape.waves(document, lambda: [{"role": "user", "content": prose(40, draw.randrange(1000))}], 4):
            chats = [seen.filled(chat) for chat in (*wave.beside, *wave.chats)]
            right = await ask_all(client, servers.reference.url, chats, MIN_TOKENS, PARALLEL)
            for server in (servers.seamark, servers.gateway):
                check_exact(await ask_all(client, server.url, chats, MIN_TOKENS, PARALLEL), right)
    assert metric(servers.seamark, rungs) >= before + len(SHAPES)


@pytest.mark.parametrize("length", SHARED)
async def test_the_second_chat_hits_at_the_seam(client, servers, unit, length):
    prompts = await with_shared_tokens(client, servers.reference.url, length, seed=101 + length)
    right = await ask_all(client, servers.reference.url, prompts[:3], MIN_TOKENS, 3)
    answers = [await ask(client, servers.gateway.url, prompt, MIN_TOKENS) for prompt in prompts[:3]]
    assert [answer.cached_tokens for answer in answers] == [0, floored(length, unit), floored(length, unit)]
    check_exact(answers, right)


async def test_every_shared_token_of_a_whole_match_unit_is_found_and_without_hints_less(client, servers, unit):
    found = {True: 0, False: 0}  # tokens, with hints and without
    for shared, own, hinted in itertools.product(SHARED, OWN, found):
        head = fresh_tokens(shared, "grid", shared, own, hinted)
        for end in (20, 21):
            prompt = [*head, end, *fresh_tokens(own, "grid", end)]
            answer = await complete(client, servers.seamark, prompt, [shared] if hinted else None, tokens=1)
        assert answer.cached_tokens == floored(shared, unit) or not hinted, (shared, own)
        found[hinted] += answer.cached_tokens
    assert found[False] < found[True]


async def test_a_cold_fan_out_on_a_long_prefix_shares_one_prefill(client, servers, unit):
    prompts = await with_shared_tokens(client, servers.reference.url, 3600, seed=102, questions=QUESTIONS[:4])
    right = await ask_all(client, servers.reference.url, prompts, MIN_TOKENS, 4)
    answers = await ask_all(client, servers.gateway.url, prompts, MIN_TOKENS, 4)
    assert max(answer.sent for answer in answers) < min(answer.first_token for answer in answers)
    assert sorted(answer.cached_tokens for answer in answers) == [0, *[floored(3600, unit)] * 3]
    check_exact(answers, right)


async def test_hints_of_several_positions_are_all_kept(client, servers, unit):
    """One request writes three states; three later ones, sharing less and less, find them."""
    prompt = await tokens_of(client, servers.reference.url, [{"role": "user", "content": prose(500, 103)}])
    await complete(client, servers.seamark, prompt, [100, 400, 700])
    for shared, hinted in ((110, 100), (500, 400), (720, 700)):
        other = [*prompt[:shared], *reversed(prompt[:60])]
        answer = await complete(client, servers.seamark, other, None)
        assert floored(hinted, unit) <= answer.cached_tokens <= floored(shared, unit)  # there may be a rung between
        check_exact(answer, await complete(client, servers.reference, other, None))


async def test_of_documents_of_one_length_the_second_question_hits(client, servers, unit):
    """Nothing names the place: it is where the documents before were left."""
    expected = 'seamark_checkpoints_written_total{kind="expected"}'
    before = metric(servers.seamark, expected)
    cached = []
    for number in range(6):
        document = fresh_tokens(1600, "document", number)
        for question in range(2):
            prompt = [*document, *fresh_tokens(800, "question", number, question)]
            answer = await completion(client, servers.seamark.url, prompt, cache_salt="documents")
            check_exact(answer, await completion(client, servers.reference.url, prompt))
            cached.append(answer.cached_tokens)
    assert cached[0] == 0 and cached[1] < floored(1600, unit) and cached[-4:] == [0, floored(1600, unit)] * 2
    assert metric(servers.seamark, expected) > before


@pytest.mark.parametrize("edge", [-1, 0, 1])
@pytest.mark.parametrize("blocks", [0, 1, 2])
async def test_prompts_that_end_around_a_boundary_and_a_block_edge(client, servers, unit, block, blocks, edge):
    length = blocks * block or 2 * unit
    prompt = await tokens_of(
        client, servers.reference.url, [{"role": "user", "content": prose(600, 104 + length + edge)}]
    )
    ends = [*prompt[: length + edge]]
    await complete(client, servers.seamark, ends, [length])
    for again in (ends, [*ends, *prompt[:30]]):
        answer = await complete(client, servers.seamark, again, [length])
        if edge >= 0 or length > block:  # a hint beyond a prompt that is shorter than a block leaves nothing to keep
            assert answer.cached_tokens >= floored(length - 2, unit) - unit
        check_exact(answer, await complete(client, servers.reference, again, None))


async def test_a_state_costs_no_pass(client, servers):
    """Cold and warm, with three boundaries and with none, one pass; prompts below and above a cache block."""
    counter = PassCounter(servers.seamark.log)
    for length, seed in ((200, 107), (900, 108)):
        prompt = await tokens_of(client, servers.reference.url, [{"role": "user", "content": prose(length, seed)}])
        for hint in ([length // 2, length // 2 + 20, len(prompt) - 5], None):
            begins = [len(hint or ()), *prompt]  # a prefix of its own
            for ends in ([*begins, 7, 8, 9], [*begins, 10, 11, 12]):
                answer = await complete(client, servers.seamark, ends, hint)
                assert counter.after([answer]).with_prompt == 1
                assert answer.cached_tokens == (0 if ends[-1] == 9 else answer.cached_tokens)
            assert answer.cached_tokens > 0


async def test_variable_lengths_in_one_batch_do_not_mix_their_states(client, servers, unit):
    """The failure of mlx-lm #1006: one offset for a whole batch stored keys that did not match the states."""
    head = await tokens_of(client, servers.reference.url, [{"role": "user", "content": prose(300, 109)}])
    for trial in range(6):
        draw = random.Random(trial)
        shared = head[: draw.randint(40, len(head))]
        prompts = [[*shared, *(draw.randrange(10, 4000) for _ in range(draw.randint(1, 200)))] for _ in range(6)]
        hints = [[len(shared), len(prompt) - 2] for prompt in prompts]
        for _ in range(2):
            answers = await asyncio.gather(
                *(complete(client, servers.seamark, p, h, tokens=8) for p, h in zip(prompts, hints, strict=True))
            )
        right = await asyncio.gather(*(complete(client, servers.reference, p, None, tokens=8) for p in prompts))
        check_exact(answers, right)
        assert all(answer.cached_tokens >= floored(len(shared), unit) for answer in answers)


async def test_two_seeded_answers_to_one_prompt_and_prompt_logprobs(client, servers):
    prompt = await tokens_of(client, servers.reference.url, [{"role": "user", "content": prose(150, 111)}])
    body = {"model": MODEL_NAME, "prompt": prompt, "max_tokens": 24, "n": 2, "seed": 5, "temperature": 1.0}
    body |= {"return_tokens_as_token_ids": True, "logprobs": 1, "ignore_eos": True}
    hint = {"vllm_xargs": {"seamark_boundaries": [100, len(prompt) - 3]}}
    answers = []
    for server, extra in ((servers.reference, {}), (servers.seamark, hint), (servers.seamark, hint)):
        choices = (await client.post(server.url + "/v1/completions", json={**body, **extra})).json()["choices"]
        answers.append(sorted(tuple(choice["logprobs"]["tokens"]) for choice in choices))
    assert answers[0] == answers[1] == answers[2]
    body = {"model": MODEL_NAME, "prompt": prompt, "max_tokens": 1, "prompt_logprobs": 1, "temperature": 0}
    listed = []
    for server, extra in ((servers.reference, {}), (servers.seamark, hint)):
        choice = (await client.post(server.url + "/v1/completions", json={**body, **extra})).json()["choices"][0]
        listed.append([entry["logprob"] for place in choice["prompt_logprobs"][1:] for entry in place.values()])
    assert listed[0] == pytest.approx(listed[1], abs=1e-4)


async def test_the_exactness_check_notices_planted_defects(client, servers, unit):
    stage = StoryStage(client, servers.reference.url, (), seed=5000)
    defects = await stories.planted_defects(stage, servers.seamark.url, servers.planted, unit)
    assert {defect.defect: defect.caught for defect in defects} == {
        "none": False,
        "another prefix's state": True,
        "a state one unit early": True,
        "the copy cure off": True,
    }


async def complete(
    client, server: Server, prompt: Sequence[int], hint: object, tokens: int | None = None
) -> TimedAnswer:
    """A completion of token ids with a hint of the test's own."""
    fields = {} if hint is None else {"vllm_xargs": {"seamark_boundaries": hint}}
    if tokens is not None:
        fields["max_tokens"] = tokens
    return await completion(client, server.url, prompt, **fields)
