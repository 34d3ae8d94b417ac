"""On vLLM's own scheduler: requests of which nothing is kept, or whose states go first, beside those of an owner.

That nothing of them is ever found is checked after each step of all random traffic (`tests.harness.audited_core`).
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.exceptions import VLLMValidationError

from engine_patches.scheduler.not_kept import refuse_what_cannot_be, why_not
from tests.harness.audit import patched_vllm
from tests.harness.audited_core import Core
from tests.harness.fan_out_audit import Unjudged

TURNS, ONE_OFFS, OWN_TOKENS = 4, 25, 1600


@pytest.fixture(scope="module", autouse=True)
def patched() -> Iterator[None]:
    with patched_vllm():
        yield


@pytest.mark.parametrize("shared", [0, 60], ids=["nothing in common", "a head, inside a block"])
@pytest.mark.parametrize("writes_in_forward", [True, False], ids=["inside the pass", "at chunk ends"])
def test_an_owners_conversation_stays_in_the_cache_beside_one_off_prompts(model: Path, writes_in_forward, shared):
    found = {}
    for keep in ("", "no", "private", "low"):
        draw, core = random.Random(1), Core(str(model), 110, 512, Unjudged(), writes_in_forward=writes_in_forward)
        talk, hits = [draw.randrange(1000) for _ in range(OWN_TOKENS)], []
        head = [draw.randrange(1000) for _ in range(shared)]
        for turn in range(TURNS):
            core.request(f"turn {turn}", talk, [-4])
            core.run()
            hits.append(core.hits[f"turn {turn}"])
            for number in range(ONE_OFFS):
                tokens = head + [draw.randrange(1000) for _ in range(draw.randrange(200, 400))]
                core.request(
                    f"job {turn} {number}",
                    tokens,
                    [shared, -4] if shared else [-4],
                    extra={"seamark_keep": keep} if keep else {},
                )
                core.run()
            talk += [draw.randrange(1000) for _ in range(60)]
        found[keep] = core.errors or hits
    assert found[""] == [0] * TURNS
    assert all(hits[0] == 0 and min(hits[1:]) >= OWN_TOKENS - 64 for hits in (found["no"], found["low"]))
    assert found["private"] == found["no"]


def test_nobody_waits_for_a_request_of_low_priority_whose_states_find_no_room(model: Path):
    draw, core = random.Random(1), Core(str(model), 120, 16_384, Unjudged(), block=1600, longest=20_000)
    core.scheduler.scheduler_config.long_prefill_token_threshold = 2048
    for tokens in (1, 1001) * 8:  # as a Spark takes
        core.scheduler.seamark.step_time.step_took(tokens, 0.4 + 0.0005 * tokens)
    for name in [*range(40), "job"]:
        core.run()
        tokens = [draw.randrange(1000) for _ in range(9000)]
        core.request(str(name), tokens, [4000, -4], extra={"seamark_keep": "low"} if name == "job" else {})
    core.request("question", tokens[:-50] + [1] * 50, [-4])
    core.step()
    assert [request.request_id for request in core.scheduler.running] == ["job", "question"]


CONFIGURATIONS: dict[str, tuple[dict[str, Any] | None, dict[str, Any], str]] = {
    "alone": (None, {}, ""),
    "NIXL": ({"kv_connector": "NixlConnector"}, {}, ""),
    "vLLM's offloading": ({"kv_connector": "OffloadingConnector"}, {}, "OffloadingConnector"),
    "an encoder's": (None, {"ec_transfer_config": object()}, "encoder"),
    "HiSparse": (None, {"attention_config": SimpleNamespace(hisparse_config=object())}, "HiSparse"),
}


@pytest.mark.parametrize(("connector", "more", "cause"), CONFIGURATIONS.values(), ids=CONFIGURATIONS)
def test_what_cannot_be_promised_is_refused_in_words(connector, more, cause):
    transfer = SimpleNamespace(**connector) if connector else None
    config = SimpleNamespace(device_config=SimpleNamespace(device_type="cpu"), kv_transfer_config=transfer, **more)
    assert cause in why_not(config) and bool(cause) == bool(why_not(config))
    add = refuse_what_cannot_be(lambda _, request: (SimpleNamespace(skip_reading_prefix_cache=False), 0))
    for keep in ("no", "private", "low", "all", ""):
        request = SimpleNamespace(sampling_params=SimpleNamespace(extra_args={"seamark_keep": keep} if keep else None))
        if keep == "all" or (cause and keep in ("no", "private")):
            with pytest.raises(VLLMValidationError, match="seamark_keep"):
                add(SimpleNamespace(vllm_config=config), request)
            continue
        made, _ = add(SimpleNamespace(vllm_config=config), request)
        assert made.skip_reading_prefix_cache == (keep == "private")
