"""Traces as they are read, the fleet that serves them in simulated time, and the policies side by side."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import median

import pytest

from tests.bench.traces import formats
from tests.bench.traces.__main__ import hint_of, main, profile_from
from tests.bench.traces.formats import BLOCK, BadTrace, Place, TraceRequest, of_mooncake, read, records, synthetic
from tests.bench.traces.policies import RoundRobin, Seamark, Smg
from tests.bench.traces.simulated_fleet import PROFILES, Execution, Fleet, Policy, Profile

EXCERPTS = Path(__file__).parents[2] / "data" / "traces"

AGENTS = EXCERPTS / "claude_code.jsonl.gz"

# Three turns of one conversation, and one request of somebody else with the same first block.
ROWS = (
    {"timestamp": 0, "input_length": 1100, "output_length": 100, "hash_ids": [0, 1, 2]},
    {"timestamp": 9000, "input_length": 1300, "output_length": 50, "hash_ids": [0, 1, 3]},
    {"timestamp": 9500, "input_length": 1536, "output_length": 5, "hash_ids": [0, 7, 8]},
    {"timestamp": 20000, "input_length": 1800, "output_length": 1, "hash_ids": [0, 1, 9, 10]},
)


def trace_file(tmp_path: Path, *lines: object) -> Path:
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(line if isinstance(line, str) else json.dumps(line) + "\n" for line in lines))
    return path


def test_turns_of_a_conversation_find_each_other_and_share_what_the_earlier_one_left(tmp_path):
    ours, other = read(trace_file(tmp_path, *ROWS)).sessions
    assert [request.turn for request in ours] == [0, 1, 2] and len(other) == 1
    places = [(place.tokens, place.kind) for place in ours[1].boundaries]
    assert places == [(BLOCK, "system"), (1200, "history"), (1300, "turn")]
    assert [request.shareable for request in ours] == [0, 1100, 1300]
    assert other[0].shareable == BLOCK


def test_where_prompts_have_parted_twice_a_later_one_asks_for_a_state(tmp_path):
    rows = [{"timestamp": at, "input_length": 1600, "output_length": 1, "hash_ids": [5, 6, 7 + at]} for at in range(3)]
    kinds = [[place.kind for place in request.boundaries] for request in read(trace_file(tmp_path, *rows)).requests]
    assert kinds == [["turn"], ["turn"], ["learned", "turn"]]


def test_claude_code_sessions_share_their_tools_and_system_prompt_and_nothing_else(tmp_path):
    request = {"in": 2048, "out": 9, "hash_ids": list(range(1, 33)), "think_time": 4.5}
    session = {"requests": [request], "tool_tokens": 600, "system_tokens": 500}
    trace = read(trace_file(tmp_path, session, session))
    (one,), (two,) = trace.sessions
    assert not trace.is_timed and one.pause == 4.5
    assert one.blocks[:2] == two.blocks[:2] and not set(one.blocks[2:]) & set(two.blocks[2:])
    assert two.shareable == 1100


@pytest.mark.parametrize(
    ("lines", "told"),
    [
        ([*ROWS, "{broken\n"], "line 5: no JSON object. A trace has one on each line; cut this one."),
        ([*ROWS, {"timestamp": 1}], "line 5: needs numbers timestamp, input_length, output_length and a list hash_ids"),
        ([{"requests": []}], "line 1: needs tool_tokens, system_tokens and a list requests"),
    ],
)
def test_a_line_that_is_wrong_is_named_with_its_cure(tmp_path, lines, told):
    with pytest.raises(BadTrace, match=told):
        read(trace_file(tmp_path, *lines))


def test_what_is_drawn_is_the_same_with_the_same_seed_and_agents_are_like_what_is_published_of_dynamos():
    assert synthetic(60, seed=3) == synthetic(60, seed=3) != synthetic(60, seed=4)
    drawn = list(records(formats.REQUESTS, 5))
    prompts = [row["input_length"] for row in drawn]
    assert len(drawn) == formats.REQUESTS and max(prompts) <= formats.CONTEXT
    for beyond, share in ((8192, 0.82), (65_536, 0.51), (131_072, 0.045)):
        assert sum(prompt >= beyond for prompt in prompts) / len(prompts) == pytest.approx(share, abs=0.03)
    assert median(row["output_length"] for row in drawn) == pytest.approx(399, rel=0.1)
    trace = of_mooncake("agents", list(enumerate(drawn, 1)))
    assert not trace.is_timed and 0.7 < sum(request.shareable for request in trace.requests) / sum(prompts) < 0.8


def served(policy: Policy, requests, profile: Profile = PROFILES["datacentre"]) -> list[Execution]:
    """What became of requests, each with its time, at as many workers as the policy knows."""
    fleet = Fleet(len(policy.workers), profile, policy, hint_of)
    for request, time in requests:
        fleet.send(request, time)
    fleet.run(1e9)
    return fleet.executions


def test_a_lone_request_takes_what_the_profile_says(tmp_path):
    profile = Profile(pass_seconds=1.0, token_seconds=0.001, sequence_seconds=0.5)
    (request,) = read(trace_file(tmp_path, ROWS[0])).requests
    (done,) = served(RoundRobin(1, 0), [(request, 0.0)], profile)
    assert (done.hit, done.first) == (0, pytest.approx(2.1))
    assert done.end == pytest.approx(2.1 + 99 * 1.5)


@pytest.mark.parametrize(("states", "hits"), [(100, [0, 1088, 512, 1296]), (1, [0, 1088, 0, 0])])
def test_a_later_turn_finds_the_state_of_the_one_before_until_it_is_evicted(tmp_path, states, hits):
    profile = Profile(cache_tokens=200_000, state_tokens=1000, state_share=states * 1000 / 200_000)
    requests = read(trace_file(tmp_path, *ROWS)).requests
    done = served(RoundRobin(1, 0), [(request, request.arrival) for request in requests], profile)
    # In order of arrival: the conversation's first two turns, the other request, the third turn.
    assert [each.hit for each in sorted(done, key=lambda each: each.arrived)] == hits


def test_seamarks_own_choice_sends_a_conversation_where_its_states_are():
    requests, policy = read(AGENTS).sessions[0], Seamark(4, 0)
    fleet = served(policy, [(request, 100.0 * at) for at, request in enumerate(requests)])
    assert len({done.worker for done in fleet}) == 1
    assert [done.hit for done in fleet] == [request.shareable // 16 * 16 for request in requests]
    assert all(worker.inflight == worker.prefill_tokens == 0 for worker in policy.workers)


# As smg 1.13.0 itself did before two, three and four workers that kept all they were sent.
@pytest.mark.parametrize(("idle", "spills_at"), [([0, 0], 11), ([4, 4], 19), ([1, 1, 1], 8), ([0, 0, 0, 0], 6)])
def test_smg_keeps_a_beginning_where_it_is_until_the_worker_is_that_far_beyond_the_mean(idle, spills_at):
    policy = Smg(len(idle), 1)
    policy.inflight = list(idle)
    chosen = []
    for own in range(40):  # prompts of four blocks, of which all have the first two
        place = (Place(4 * BLOCK, "turn", own + 1),)
        prompt = TraceRequest(own, 0, 0.0, 0.0, 4 * BLOCK, 5, (-2, -1, 2 * own, 2 * own + 1), place, place, 0)
        chosen.append(policy.choose(Execution(str(own), prompt, (), 0.0)))
    assert chosen.index(next(worker for worker in chosen if worker != chosen[0])) + idle[chosen[0]] == spills_at


@pytest.mark.parametrize("trace", [EXCERPTS / "mooncake_conversation.jsonl.gz", AGENTS])
def test_the_table_has_a_line_for_each_policy_the_same_with_the_same_seed(trace, capsys):
    policies = ("smg", "session", "round-robin", "seamark")
    flags = [str(trace), "--workers", "2", "--users", "2", "--seconds", "60"]
    tables = []
    for _ in range(2):
        assert main([*flags, *(word for policy in policies for word in ("--policy", policy))]) == 0
        tables.append(capsys.readouterr().out)
    assert tables[0] == tables[1]
    for policy in policies:
        (line,) = (line.split() for line in tables[0].splitlines() if line.split()[1:2] == [policy])
        hits, of_all, p50, p99, per_second, imbalance = map(float, line[2:])
        assert 0 < of_all < hits <= 1 and p99 >= p50 > 0 and per_second > 0 and 1 <= imbalance <= 2


def test_a_profile_comes_from_a_file_and_a_wrong_one_is_refused(tmp_path, capsys):
    path = tmp_path / "profile.json"
    path.write_text('{"token_seconds": 0.002}')
    assert profile_from(str(path)) == Profile(token_seconds=0.002)
    for text in ('{"tokens": 1}', '{"token_seconds": 0}', "{"):
        path.write_text(text)
        with pytest.raises(SystemExit, match="2"):
            main(["--profile", str(path)])
        assert "a JSON object of positive numbers, of pass_seconds," in capsys.readouterr().err
