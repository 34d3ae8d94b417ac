"""Prefill and decode apart over NIXL, with two real engines. `make test-nixl` runs it: NIXL is not in the lock.

P prefills 20 chats of two rounds, four at a time; D loads what P computed and answers. An answer is right if the same
engine, computing all of it, says the same.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from proxy.bench.harness.servers import NEMOTRON_H, generated_model
from tests.harness.transfer_engine import (
    CONSUMER,
    PREFILL,
    PRODUCER,
    Prompt,
    TransferEngine,
    cached,
    differing,
    nixl_transfer,
    prompts_of,
    two_round_chats,
)

BLOCK = 384  # tokens

pytestmark = [pytest.mark.on_request, pytest.mark.timeout(900)]


class Apart:
    """P and D."""

    def __init__(self, p: TransferEngine, d: TransferEngine) -> None:
        self.p, self.d = p, d

    def prefilled(self, prompts: list[Prompt], **more: Any) -> list[Any]:
        return self.p.call("ask", prompts=[prompt | {"transfer": PREFILL} | more for prompt in prompts], tokens=1)

    def parameters(self, prompt: Prompt, **more: Any) -> dict[str, Any]:
        (answer,) = self.prefilled([prompt], **more)
        return answer["transfer"]

    def decoded(self, prompt: Prompt, transfer: Any = None, **more: Any) -> Any:
        (answer,) = self.d.call("ask", prompts=[prompt | {"transfer": transfer} | more])
        return answer

    def anew(self, prompts: list[Prompt]) -> list[Any]:
        return self.d.call("ask", prompts=[{"ids": prompt["ids"], "anew": True} for prompt in prompts])

    def is_right(self, prompt: Prompt, answer: Any) -> bool:
        return not differing([answer], self.anew([prompt]))

    def freed(self) -> None:
        """Wait until P's blocks are its own again."""
        deadline = time.monotonic() + 120
        while self.p.call("requests"):
            assert time.monotonic() < deadline
            time.sleep(0.05)

    def is_right_from_now_on(self, prompt: Prompt) -> bool:
        """Whether a plain request and one through P are answered right."""
        plain = self.decoded(prompt)
        through = self.decoded(prompt, self.parameters(prompt))
        return not differing([plain, through], self.anew([prompt, prompt]))


@pytest.fixture(scope="module")
def apart(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Apart]:
    model = generated_model(print, NEMOTRON_H)
    folder = tmp_path_factory.mktemp("apart")
    with (
        TransferEngine(folder, model, nixl_transfer(PRODUCER)) as p,
        TransferEngine(folder, model, nixl_transfer(CONSUMER)) as d,
    ):
        assert p.call("says")["inside_pass"] and d.call("says")["inside_pass"]
        p.call("lease", seconds=600)
        yield Apart(p, d)


@pytest.fixture
def fresh(tokenizer: Any, request: pytest.FixtureRequest) -> list[Prompt]:
    """Prompts that nobody has seen, of 200 to 1,800 tokens."""
    return prompts_of(tokenizer, two_round_chats(seed=sum(map(ord, request.node.name)) + 4000)[0])


def test_p_writes_in_its_passes_and_d_keeps_what_it_loaded(apart: Apart, tokenizer: Any):
    first, second = (prompts_of(tokenizer, chats) for chats in two_round_chats())
    for prompts, least in ((first, 7_900), (second, 13_456), (second, 16_500)):
        apart.p.call("taken_passes")
        sent = apart.prefilled(prompts)
        passes = apart.p.call("taken_passes")
        asked = [prompt | {"transfer": answer["transfer"]} for prompt, answer in zip(prompts, sent, strict=True)]
        answers = apart.d.call("ask", prompts=asked)
        print(f"P {passes} passes, {cached(sent)} of {sum(len(p['ids']) for p in prompts)} tokens cached")
        assert not differing(answers, apart.anew(prompts))
        assert passes <= 6 and cached(sent) >= least
    alone = apart.d.call("ask", prompts=second)
    print(f"D alone {cached(alone)} of {sum(len(p['ids']) for p in second)}")
    assert not differing(alone, apart.anew(second)) and cached(alone) >= 16_500
    apart.freed()


def test_a_prompt_without_a_hint_is_handed_over_too(apart: Apart, fresh: list[Prompt]):
    prompts = [
        {"ids": prompt["ids"][:length]} for prompt, length in zip(fresh, (5, 16, 17, 33, 130, 2000), strict=False)
    ]
    for prompt in prompts:
        sent = apart.parameters(prompt)
        answer = apart.decoded(prompt, sent)
        assert answer["cached"] == sent["remote_prefill_cached_tokens"] and apart.is_right(prompt, answer)
    apart.freed()


@pytest.mark.parametrize("longer_by", [-3, 0, 3])
def test_the_prefill_of_another_prompt_is_computed_and_p_is_told(apart: Apart, fresh: list[Prompt], longer_by: int):
    """Of one that is so many blocks longer, at least. vLLM's engine ends where the numbers of blocks do not fit."""
    by_length = sorted(fresh, key=lambda prompt: len(prompt["ids"]))
    short, long = by_length[0], by_length[-1]
    assert len(long["ids"]) - len(short["ids"]) >= abs(longer_by) * BLOCK
    alike = short | {"ids": [short["ids"][0], short["ids"][1] ^ 1, *short["ids"][2:]]}
    asked, other = {-3: (long, short), 0: (short, alike), 3: (short, long)}[longer_by]
    answer = apart.decoded(asked, apart.parameters(other))
    assert apart.is_right(asked, answer)
    apart.freed()
    assert apart.is_right_from_now_on(asked)


def test_a_prefill_under_another_salt_is_computed(apart: Apart, fresh: list[Prompt]):
    asked = fresh[4]
    salted = apart.parameters(asked, salt="one")
    assert apart.is_right(asked, apart.decoded(asked, salted, salt="two"))
    same = apart.decoded(asked, apart.parameters(asked, salt="three"), salt="three")
    assert apart.is_right(asked, same)
    apart.freed()


def test_a_prefill_is_taken_once(apart: Apart, fresh: list[Prompt]):
    sent = apart.parameters(fresh[4])
    assert apart.is_right(fresh[4], apart.decoded(fresh[4], sent))
    apart.freed()
    assert apart.p.call("overwrite")
    again = apart.decoded(fresh[4], sent, salt="again")
    assert apart.is_right(fresh[4], again) and apart.is_right_from_now_on(fresh[4])


def lapsed(apart: Apart, prompt: Prompt) -> dict[str, Any]:
    """Parameters of a prefill whose blocks have other owners by now."""
    apart.p.call("lease", seconds=1)
    sent = apart.parameters(prompt)
    apart.p.call("lease", seconds=600)
    apart.freed()
    assert apart.p.call("overwrite")
    return sent


def test_a_prefill_that_is_no_longer_there_is_computed(apart: Apart, fresh: list[Prompt]):
    asked = fresh[4]
    answer = apart.decoded(asked, lapsed(apart, asked))
    assert apart.is_right(asked, answer) and apart.is_right_from_now_on(asked)


def test_a_client_that_leaves_in_between_frees_ps_blocks(apart: Apart, fresh: list[Prompt]):
    sent = apart.parameters(fresh[4])
    assert apart.p.call("requests") == 1
    apart.d.call("abort_before_it_is_scheduled", prompt=fresh[4] | {"transfer": sent})
    apart.freed()


def test_without_the_checks_these_answers_are_wrong(apart: Apart, fresh: list[Prompt]):
    asked, late = fresh[4], fresh[9]
    other = asked | {"ids": [asked["ids"][0], *reversed(asked["ids"][1:-1]), asked["ids"][-1]]}
    apart.d.call("plant", defect="content")
    answer = apart.decoded(asked, apart.parameters(other))
    apart.d.call("plant", defect="deadline")
    gone = apart.decoded(late, lapsed(apart, late))
    apart.d.call("plant", defect="")
    assert not apart.is_right(asked, answer) and not apart.is_right(late, gone)
    apart.freed()
    assert apart.d.call("overwrite")  # its cache holds what was loaded


def test_p_killed_while_it_is_read_from_costs_only_time(apart: Apart, fresh: list[Prompt], tmp_path: Path):
    """It stands still from when D gets to know of the prompt, so that whatever D asks it for is under way."""
    with TransferEngine(tmp_path, generated_model(print, NEMOTRON_H), nixl_transfer(PRODUCER)) as p:
        other = Apart(p, apart.d)
        p.call("lease", seconds=600)
        assert other.is_right(fresh[3], other.decoded(fresh[3], other.parameters(fresh[3])))  # they have met
        sent = other.parameters(fresh[4])
        p.process.send_signal(signal.SIGSTOP)
        with ThreadPoolExecutor() as threads:
            answer = threads.submit(other.decoded, fresh[4], sent)
            time.sleep(1)
            p.process.kill()
            assert other.is_right(fresh[4], answer.result())
    assert apart.is_right_from_now_on(fresh[4]) and apart.is_right_from_now_on(fresh[9])


def test_p_killed_in_between_costs_only_time(apart: Apart, fresh: list[Prompt]):
    sent = apart.parameters(fresh[4])
    apart.p.process.kill()
    apart.p.process.wait()
    assert apart.is_right(fresh[4], apart.decoded(fresh[4], sent))
    assert apart.is_right(fresh[9], apart.decoded(fresh[9]))
