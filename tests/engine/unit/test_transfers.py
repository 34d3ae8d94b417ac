"""Prefills of other workers: where they stop, which of them are loaded, and what is told of those that are sent."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from engine_patches.forward.loaded_weights import Weights
from engine_patches.scheduler.grid import Grid
from engine_patches.scheduler.planner import HINTED, CheckpointTarget
from engine_patches.scheduler.transfers import (
    CONTENT,
    CUT,
    DEADLINE,
    NOT_WHOLE,
    SAMPLED,
    STOPS,
    TAKEN,
    Transfers,
    load_what_was_computed,
    name_what_is_sent,
)

UNIT = 16  # tokens


ENGINE = Weights("loaded", "", "whole", "sampled")


class Worker:
    """What transfers see of one engine."""

    def __init__(self, weights: Weights = ENGINE, targets: tuple[int, ...] = (), **more: Any) -> None:
        self.cached: set[int] = set()
        self.checkpoints = SimpleNamespace(
            grid=Grid(UNIT, UNIT),
            verified=more.get("verified", 1),
            weights=weights,
            state_of=lambda request: request.seamark,
            targets=lambda request: [CheckpointTarget(position, HINTED) for position in targets],
        )
        states = SimpleNamespace(
            in_pass=more.get("in_pass", True),
            keys=SimpleNamespace(is_cached=lambda request, position: position in self.cached),
        )
        self.transfers = Transfers(self.checkpoints, states)

    def offer(self, tokens: int = 100, number: int = 1, **more: Any) -> dict[str, Any]:
        """What a gateway brings of a prefill of so many tokens here, with other parameters where they are given."""
        address = dict(remote_block_ids=[[1]], remote_engine_id="p", remote_host="h", remote_port=1)
        names = self.transfers.names_of(asked(tokens))
        own = {"remote_request_id": f"cmpl-{number}", "remote_num_tokens": tokens, DEADLINE: 7.0}
        offer = {"do_remote_prefill": True, **address, **own, **names, **more}
        return {name: value for name, value in offer.items() if value != "missing"}

    def refuses(self, request: Any, offer: dict[str, Any]) -> str:
        return self.transfers.look_at(request, offer)


def asked(tokens: int = 150, salt: str = "", **more: Any) -> Any:
    """A vLLM `Request` of so many tokens, counted up."""
    ids = list(range(tokens))
    made = SimpleNamespace(
        request_id="r",
        prompt_token_ids=list(ids),
        prompt_embeds=None,
        _all_token_ids=list(ids),
        num_prompt_tokens=tokens,
        num_output_tokens=0,
        num_computed_tokens=0,
        block_hashes=[f"{salt}{end}".encode() for end in range(UNIT, tokens + 1, UNIT)],
        mm_features=[],
        lora_request=None,
        cache_salt=salt or None,
        kv_transfer_params=None,
        seamark=SimpleNamespace(prompt_tokens=0, loaded=0),
    )
    made.all_token_ids = made._all_token_ids
    vars(made).update(more)
    return made


@pytest.mark.parametrize("tokens", [1, 15, 100, 144, 149])
def test_what_an_equal_worker_computed_of_a_prompt_is_loaded_once(tokens):
    worker, request = Worker(), asked()
    assert worker.refuses(request, worker.offer(tokens)) == ""
    assert request.seamark.loaded == tokens
    assert worker.refuses(request, worker.offer(tokens)) == ""  # asked again: there was no room
    assert worker.refuses(asked(), worker.offer(tokens)) == TAKEN
    assert worker.refuses(asked(), worker.offer(tokens, number=2)) == ""


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        *(({f"remote_{name}": None}, NOT_WHOLE) for name in ("block_ids", "engine_id", "request_id", "host", "port")),
        ({CONTENT: "missing"}, "no Seamark"),
        ({DEADLINE: "missing"}, "no Seamark"),
        ({"remote_num_tokens": 150}, "another length"),
        ({"remote_num_tokens": 99}, "another prompt"),
        ({CONTENT: "0" * 32}, "another prompt"),
        ({CUT: "in two", SAMPLED: ""}, "another number of ranks"),
        ({CUT: "in two", SAMPLED: "0" * 32}, "another prompt"),
    ],
    ids=str,
)
def test_what_is_doubtful_is_computed_and_each_cause_is_said_once(engine_log, changed, told):
    worker = Worker()
    causes = [worker.refuses(request := asked(), worker.offer(number=number, **changed)) for number in (1, 2)]
    assert causes[0] == causes[1] and told in causes[0] and request.seamark.loaded == 0
    assert len(engine_log.messages) == 1 and told in engine_log.messages[0]
    assert told != NOT_WHOLE or worker.refuses(request, worker.offer(number=1)) == "", "it counts as taken by nobody"


@pytest.mark.parametrize(
    ("here", "there", "is_loaded"),
    [
        (ENGINE, ENGINE, True),
        (ENGINE, Weights("others", "", "whole", "sampled"), False),
        (ENGINE, Weights("loaded", "", "in two", "sampled"), True),  # cut otherwise: samples are compared
        (ENGINE, Weights("loaded", "", "in two", "others"), False),
        (Weights("", "?", "", "sampled"), Weights("", "?", "", "sampled"), True),
        (Weights("", "unknown to me", "", ""), ENGINE, False),
        (ENGINE, Weights("", "?", "", ""), False),
    ],
)
def test_only_what_the_same_weights_have_computed_is_loaded(here, there, is_loaded):
    refusal = Worker(here).refuses(asked(), Worker(there).offer())
    assert (refusal == "") is is_loaded
    assert not here.unknown or is_loaded or here.unknown in refusal


def test_a_name_stands_for_tokens_weights_and_what_else_a_hash_covers():
    contents = Worker().transfers.content_of
    requests = [asked(), asked(200), asked(salt="s")]
    assert contents(requests[0], 100, "w") == contents(requests[1], 100, "w")
    others = [
        contents(request, tokens, weights)
        for request, tokens, weights in (
            (requests[0], 100, "w"),
            (requests[0], 96, "w"),
            (requests[0], 101, "w"),
            (requests[0], 100, "x"),
            (requests[2], 100, "w"),
            (requests[2], 9, "w"),
            (requests[0], 9, "w"),
        )
    ]
    other_words = asked()
    other_words.all_token_ids[97] = 7  # behind the last whole unit
    others.append(contents(other_words, 100, "w"))
    assert len(set(others)) == len(others) and all(len(each) == 32 for each in others)
    assert contents(requests[0], 100, "") == ""


IMAGE = SimpleNamespace(mm_position=SimpleNamespace(offset=100, length=12))


@pytest.mark.parametrize(
    ("worker", "changed", "cached", "left"),
    [
        ({}, {}, (), 112),
        ({"in_pass": False}, {}, (), 150),
        ({"verified": 2}, {}, (), 150),
        ({}, {"num_output_tokens": 1}, (), 150),
        ({}, {"prompt_is_token_ids": [True]}, (), 150),
        ({"targets": (150,)}, {}, (), 150),
        ({}, {"mm_features": [IMAGE]}, (), 112),  # it ends right there
        ({"targets": (96,)}, {"mm_features": [IMAGE]}, (), 150),
        ({}, {}, (96,), 112),
        ({}, {}, (112,), 150),  # it would have to go back behind that state
    ],
    ids=str,
)
def test_a_prompt_is_cut_only_where_that_serves_and_nothing_is_cut_in_two(worker, changed, cached, left):
    made = Worker(**{"targets": (112,), **worker})
    made.cached.update(cached)
    request = asked(150, **changed)
    made.transfers.stop_at_the_last_state(request)
    assert request.num_prompt_tokens == len(request._all_token_ids) == left
    assert len(request.block_hashes) == left // UNIT


def connector(worker: Worker | None) -> SimpleNamespace:
    """NIXL's half in a scheduler."""
    stopped: list[str] = []
    half = SimpleNamespace(
        _reqs_need_recv={}, _reqs_need_send={"r": 9.0}, stopped=stopped, _stop_heartbeat=stopped.append
    )
    if worker is not None:
        half.seamark = worker.transfers
    return half


def matched(half: Any, request: Any, computed: int = 0) -> Any:
    """What a connector says of tokens that come from elsewhere; "vLLM's" if that was left to vLLM."""
    return load_what_was_computed(lambda *_: "vLLM's")(half, request, computed)


@pytest.mark.parametrize(("computed", "told"), [(0, (100, True)), (64, (36, True)), (100, (0, False))])
def test_what_is_loaded_is_what_the_cache_does_not_have_and_who_loads_nothing_is_left_to_vllm(computed, told):
    worker = Worker(targets=(112,))
    request = asked(kv_transfer_params=worker.offer())
    assert matched(connector(worker), request, computed) == told
    assert request.kv_transfer_params["do_remote_prefill"] and request.seamark.loaded == 100
    assert matched(connector(worker), asked()) == matched(connector(None), request) == "vLLM's"
    request.kv_transfer_params = {"do_remote_prefill": False}
    assert matched(connector(worker), request) == "vLLM's" and request.seamark.loaded == 0


@pytest.mark.parametrize(
    ("changed", "is_told"), [({CONTENT: "0" * 32}, True), ({"remote_port": None}, False), ({"number": 7}, False)]
)
def test_what_is_refused_is_computed_and_the_worker_that_has_it_is_told_where_it_can_be(changed, is_told):
    worker, half = Worker(), connector(None)
    half.seamark = worker.transfers
    worker.refuses(asked(), worker.offer(number=7))
    request = asked(kv_transfer_params=worker.offer(**changed))
    assert matched(half, request) == (0, False)
    assert request.kv_transfer_params["do_remote_prefill"] is False and half.stopped == ["r"]
    assert half._reqs_need_recv == ({"r": (request, [], (), False)} if is_told else {})


PREFILL = {"do_remote_decode": True, STOPS: True, "_p_side_truncated": True}


@pytest.mark.parametrize("missing", [None, *PREFILL])
def test_a_prefill_is_cut_only_if_who_loads_it_goes_by_its_length(missing):
    request = asked(150, kv_transfer_params={name: True for name in PREFILL if name != missing})
    assert matched(connector(Worker(targets=(112,))), request) == "vLLM's"
    assert request.num_prompt_tokens == (112 if missing is None else 150)


def test_who_leaves_before_its_turn_has_nothing_told_of_what_another_has_taken():
    worker = Worker()
    first, second = (asked(kv_transfer_params=worker.offer()) for _ in range(2))
    worker.refuses(first, first.kv_transfer_params)

    for request in (first, second):
        name_what_is_sent(lambda *_: (True, None))(connector(worker), request, ())
    assert first.kv_transfer_params["do_remote_prefill"] and not second.kv_transfer_params["do_remote_prefill"]
