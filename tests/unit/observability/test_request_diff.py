"""A changed prefix is named, by what differs and of what kind that is; what prompts share is learnt."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import pytest

from proxy.boundaries.divergence import common_prefix
from proxy.boundaries.layout import layout_of
from proxy.chat.chat import CHAT, MESSAGES
from proxy.chat.reader import chat_in
from proxy.chat.responses import StoredResponses
from proxy.observability.request_diff import CHANGE_TEXT, MAX_REQUESTS, MAX_TOOL_BYTES, RememberedRequest, RequestMemory
from proxy.observability.shadow import MIN_SHARED, SharedTokens
from proxy.observability.volatile_text import TextKind, alike, kind_of
from tests.harness.changed_requests import changed_requests
from tests.harness.steps import finished

NOW = 1795600000.0  # in November 2026


def remembering(size: int = 10**7) -> RequestMemory:
    return RequestMemory(size, now=lambda: NOW)


def as_recent(body: dict, path: str = CHAT, owner: str | None = None) -> RememberedRequest:
    layout = layout_of(chat_in(path, body, StoredResponses(0)), b"r")
    return RememberedRequest(layout, len(json.dumps(body)), owner)


PROMPT = 1000  # tokens


def changed(*bodies):
    """Where the last of these requests leaves one of those before it; its engine has seen nothing like it."""
    recent = remembering()
    for body in bodies:
        recent.add(last := as_recent(body))
    return finished(recent.seek_change(last, PROMPT, 0))


def test_in_fifty_generated_cases_the_right_part_is_named():
    for case in changed_requests(50, random.Random(4)):
        change = changed(*case.others, case.first, case.second)
        assert change is not None, case.description
        assert (change.what, change.position) == (case.what, case.index), case.description


def messages(*texts):
    roles = ("system", *("user", "assistant") * 20)
    return [{"role": role, "content": text} for role, text in zip(roles, texts, strict=False)]


LONG = "You pilot ships into the harbour, and you name the tide. " * 5


def test_the_salt_alone_is_told_apart():
    body = {"messages": messages(LONG, "First?"), "tool_choice": "auto"}
    unseen = {"tool_choice": "none", "response_format": {"type": "text"}, "documents": []}
    change = changed({**body, "cache_salt": "a"}, {**body, **unseen, "cache_salt": "b"})
    assert change.is_salt and change.lost > 0.8 * PROMPT
    shown = change.as_json(excerpts=True)
    assert shown["before"] is None and shown["now"] is None
    for other in ({"cache_salt": "b", "reasoning_effort": "none"}, {"model": "b", "reasoning_effort": "none"}):
        assert changed({**body, "cache_salt": "a", "model": "a"}, {**body, "model": "a", **other}) is None


def test_of_two_owners_neither_learns_of_the_other():
    memory, kept = remembering(), []
    first, longer = (messages(LONG, "Tide?", *turns) for turns in ((), ("At nine.", "And then?")))
    for owner, said in (("ann", first), ("bo", longer), ("ann", longer)):
        kept.append(as_recent({"messages": said}, owner=owner))
        memory.add(kept[-1])
        kept[-1].prompt = PROMPT
        assert finished(memory.seek_change(kept[-1], PROMPT, 0)) is None
    assert [each.continued is not None for each in kept] == [False, False, True]


TOOLS = [{"type": "function", "function": {"name": name, "description": LONG}} for name in ("wind", "tide", "ice")]


AT_NOON, LATER = (messages(f"{LONG}It is {time} now. {LONG}", LONG, "Aye.", "Tide?") for time in ("12:05", "18:21"))

THINKS = {"role": "assistant", "content": None, "reasoning": LONG, "tool_calls": [{"function": {"name": "wind"}}]}

TURNED = [*messages(LONG, LONG), THINKS, {"role": "tool", "content": LONG}]

TURNED_AGAIN = [*TURNED[:2], {**THINKS, "reasoning": "Well."}, TURNED[3]]


@pytest.mark.parametrize(
    ("first", "second", "what", "position", "role", "kind", "character"),
    [
        (AT_NOON, LATER, "message", 0, "system", "times", len(f"{LONG}It is 1")),
        (messages(f"{LONG} One.", LONG), messages(f"{LONG} Two.", LONG), "message", 0, "system", None, len(LONG) + 1),
        (TURNED, TURNED_AGAIN, "message", 2, "assistant", "thinking_history", None),
        (TURNED, [*TURNED[:2], *TURNED[:1], *TURNED[2:]], "message", 2, "system", "system_moved", None),
        (TOOLS, TOOLS[::-1], "tool", 0, "ice", "tools_sorted", None),
        (TOOLS, [TOOLS[0], dict(reversed(TOOLS[1].items())), TOOLS[2]], "tool", 1, "tide", "tool_keys_sorted", 2),
        (TOOLS[:-1], TOOLS, "tool", 2, "ice", None, None),
    ],
)
def test_the_first_difference_is_named(first, second, what, position, role, kind, character):
    def body(part):
        return {"messages": messages(LONG, "Q"), "tools": part} if part[0].keys() >= {"type"} else {"messages": part}

    change = changed(body(first), body(second))
    assert change[:5] == (what, position, role, character, kind)


def continued_by(before: dict, after: dict, path: str = CHAT) -> Callable[[int], Any]:
    """What is found otherwise of a request that continues one of 1,000 tokens, of which so many are shared."""
    memory = remembering()
    for body in (before, after):
        memory.add(last := as_recent(body, path))
        last.prompt = PROMPT
    assert finished(memory.seek_change(last, PROMPT, 0)) is None
    return lambda shared: finished(memory.rendered_otherwise(last, shared))


def test_a_days_question_asked_again_the_next_day_differs_by_its_date():
    """As agents do that put a reminder with the date before the user's own words, in one message."""

    def bodies(said):
        asked = ({"role": "user", "content": said(f"2026-11-{day}")} for day in (22, 23))
        return ({"messages": [*messages(LONG * 20), each]} for each in asked)

    def reminder(day):
        texts = (f"<reminder>\n{LONG}\nToday's date is {day}.\n\n{LONG}</reminder>", "How do the events run?")
        return [{"type": "text", "text": text} for text in texts]

    change = changed(*bodies(reminder))
    assert (change.position, change.kind) == (1, "dates")
    assert changed(*bodies(lambda day: f"What is the tide on {day}? Answer like this: {LONG}")) is None


THOUGHT = [
    {"role": "user", "content": "Fix the rounding."},
    {"role": "assistant", "content": "I look.", "reasoning": "Let me look at the file first. " * 20},
    {"role": "tool", "content": "round(x)" * 20, "tool_call_id": "c"},
]


NEXT = [{"role": "assistant", "content": "Done."}, {"role": "user", "content": "And now the other one."}]


def test_thinking_that_a_template_drops_is_named_by_what_is_missing():
    before = [*messages(LONG * 20), *THOUGHT]
    otherwise = continued_by({"messages": before}, {"messages": [*before, *NEXT]})
    assert otherwise(PROMPT - 5) is None  # all of it but the words that ask for an answer
    assert otherwise(16) is None  # an engine that has forgotten it
    change = otherwise(PROMPT - 400)
    assert (change.kind, change.position, change.role) == ("thinking_history", 2, "assistant")
    assert (change.token, change.lost) == (PROMPT - 400, 400)
    assert "truncate_history_thinking" in change.as_json(excerpts=True)["cure"]


def test_reminders_that_vllm_merges_into_the_system_prompt_are_named():
    loop = [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": "done"}]}]
    said = [{"role": "user", "content": "Go on."}, {"role": "assistant", "content": "Yes."}, *loop]
    first = {"system": LONG * 20, "messages": said}
    second = {"system": LONG * 20, "messages": [*said, {"role": "system", "content": "Use the list of tasks."}]}
    change = continued_by(first, second, MESSAGES)(PROMPT - 300)
    assert (change.kind, change.lost) == ("system_merged", 300)


def test_each_kind_has_a_cure_and_a_row_in_the_readme():
    readme = (Path(__file__).parents[3] / "proxy" / "README.md").read_text()
    told = {
        word for line in readme.splitlines() if line.startswith("| `") for word in line.split("|")[1].split("`")[1::2]
    }
    assert set(get_args(TextKind)) <= set(CHANGE_TEXT) <= told
    for _, cure in CHANGE_TEXT.values():
        assert cure[0].isupper() and cure[-1] == "."


def test_what_is_remembered_is_bounded_in_bytes_and_in_number():
    added = [as_recent({"messages": messages(f"{number} " + "x" * 500, "Q")}) for number in range(3 * MAX_REQUESTS)]
    few, many, none = remembering(20_000), remembering(), remembering(0)
    none.add(added[0])
    assert none.held == 0 and finished(none.seek_change(added[0], PROMPT, 0)) is None
    for request in added:
        few.add(request)
        many.add(request)
        kept = list(few._requests.values())
        assert few.held == sum(each.size for each in kept) <= 20_000 and kept[-1] is request
    assert 1 < len(kept) < MAX_REQUESTS  # the bytes were the limit
    few.add(as_recent({"messages": messages("x" * 30_000, "Q")}))
    assert list(few._requests.values()) == kept  # a request that never fits leaves the others alone
    assert list(many._requests.values()) == added[-MAX_REQUESTS:]
    assert many.held == sum(each.size for each in added[-MAX_REQUESTS:])


SAID = [{"role": "user", "content": "Fix the rounding."}, {"role": "assistant", "content": "I look." * 20}]


@pytest.mark.parametrize(
    ("before", "added"),
    [
        (THOUGHT, NEXT[:1]),  # the loop is not over: no user has spoken
        (SAID, NEXT),  # nobody thought
        ([*THOUGHT[:2], {"role": "user", "content": "Next."}, *SAID[1:]], NEXT),  # not since the user spoke last
        (THOUGHT, [NEXT[0], {"role": "system", "content": "Use the list."}]),  # merged by the messages API alone
    ],
)
def test_without_thinking_of_a_loop_that_is_over_nothing_is_dropped(before, added):
    before = [*messages(LONG * 20), *before]
    assert continued_by({"messages": before}, {"messages": [*before, *added]})(500) is None


def test_into_a_tool_that_is_too_long_nobody_looks_for_another_order_of_keys():
    chat = messages(LONG * 100, LONG * 1000, "tide?")
    kinds = []
    for size in (100, MAX_TOOL_BYTES):
        one = {"type": "function", "function": {"name": "wind", "description": "x" * size}}
        other = {"function": dict(reversed(one["function"].items())), "type": "function"}
        change = changed({"messages": chat, "tools": [one]}, {"messages": chat, "tools": [other]})
        assert change is not None and (change.what, change.position) == ("tool", 0)
        kinds.append((change.kind, change.characters is None))
    assert kinds == [("tool_keys_sorted", False), (None, True)]


def kind(new: str, old: str) -> str | None:
    return finished(kind_of(new, old, common_prefix(new, old), NOW))


CHANNEL = " Keep clear of the bar.\nNever leave the channel without a pilot on board, and call the lock first.\n"

CASES = [
    ("2026-11-22", "2026-11-23", "dates"),
    ("11/22/2026", "11/23/2026", "dates"),
    ("noviembre de 2026", "diciembre de 2026", "dates"),
    ("22.11.2026", "1.12.2026", "dates"),
    ("November 22nd, 2026", "December 3rd, 2026", "dates"),
    ("the 22nd of November 2026", "the 23rd of November 2026", "dates"),
    ("今天是2026年11月22日星期日。", "今天是2026年11月25日星期三。", "dates"),
    ("٢٥ نوفمبر ٢٠٢٦", "٢٦ نوفمبر ٢٠٢٦", "dates"),
    ("1795600000", "1795690000", "dates"),  # a Unix time of another day
    ("1795564799", "1795564800123", "dates"),  # the last second of a day, and the next millisecond
    ("1795564800", "1795651199", "times"),
    ("20261125101112", "20261126101112", "dates"),
    ("9:59", "10:00", "times"),
    ("10:11", "10:11:05", "times"),
    ("9:05 a.m.", "10:15 p.m.", "times"),
    ("2026-11-22T10:11:12.123456+01:00", "2026-11-22T10:11:13.523456+01:00", "times"),
    ("Sun Nov 22 10:11:12 UTC 2026", "Sun Nov 22 11:51:12 UTC 2026", "times"),
    ("10:11 Europe/Berlin", "10:12 Europe/Berlin", "times"),
    ("1795342272.517", "1795342299.004", "times"),
    ("3f2b8c1e-9d4a-4c6b-8f0e-5a7d1b2c3e4f", "a91c0d7e-1b2c-4d3e-9f8a-7b6c5d4e3f2a", "uuid"),
    ("ses_dfde55eccffeiuAx", "ses_1fde55eccffeiuBx", "uuid"),
    ("22/11/26", "23/11/26", "number"),  # which of these is a year, no rule knows
    ("v2026.11.22", "v2026.11.23", "number"),
    ("since 2026-11-22 by Ann", "since 2026-11-22 by Bo", None),
    ("C:\\Users\\ann", "C:\\Users\\bo", "path"),
    ("Working directory: /srv/ann", "Working directory: /srv/bo", "working_directory"),
    ("<total_tokens>17</total_tokens>", "<total_tokens>9</total_tokens>", "token_counters"),
    ("2026-11-22", "a day in June", None),
    ("In May 2026", "In June 2026", "dates"),  # a word and a year, of which one has changed
    ("It is 2026", "It is 2027", "number"),
    ("17", "/srv/ann", None),
]


@pytest.mark.parametrize("head", ["", "You pilot ships. Today is "])
@pytest.mark.parametrize(("old", "new", "expected"), CASES)
def test_the_kind_of_what_differs_is_told_wherever_it_stands(head, old, new, expected):
    one, other = head + old + CHANNEL, head + new + CHANNEL
    assert kind(other, one) == kind(one, other) == expected


DATES, NO_DATES = (
    part.splitlines()[1:] for part in (Path(__file__).parent / "dates.txt").read_text().removeprefix("#").split("\n#")
)


@pytest.mark.parametrize(
    ("told", "is_date"), [*((each, True) for each in DATES), *((each, False) for each in NO_DATES)]
)
def test_a_date_is_known_in_any_language_and_what_only_looks_like_one_is_not(told, is_date):
    one, other = (f"{CHANNEL}The note: {each} all day.{CHANNEL}" for each in (told, "2026-01-30"))
    assert (kind(one, other) == "dates") is is_date
    assert finished(kind_of(one, other, common_prefix(one, other), NOW + 3 * 366 * 86_400)) != "dates"  # much later


def test_a_git_status_is_one_kind_whatever_changes_in_it():
    git = "gitStatus: as it was.\n\nCurrent branch: {branch}\n\nStatus:\n{status}\n\nRecent commits:\n{commits}\n"
    was = {"branch": "main", "status": "(clean)", "commits": "1a2b3c4 Tides"}
    for change in (
        {"status": " M src/tides.py\n?? notes/"},
        {"commits": "89abcde Locks\n1a2b3c4 Tides"},
        {"branch": "locks", "status": "R  a.py -> b.py", "commits": "89abcde Locks"},
    ):
        one, other = (f"{CHANNEL}{git.format(**state)}{CHANNEL}" for state in ({**was, **change}, was))
        assert kind(one, other) == kind(other, one) == "git_status"


def test_no_text_is_slow():
    """Long texts of what patterns are made of, 200 kB each; a busy machine may try three times."""
    draw, size = random.Random(3), 200_000
    atoms = ["1", "a", "-", "/a", "1.", "1,", "1:", "Nov ", "Nov 1 ", "12:34 ", "am ", "T1", "\n", "a\n", " ", "a-1"]
    atoms += ["1 tokens ", "git status\n", " M a\n", "UTC+", "(", "Europe/", "20261122T", "年", ", of ", "\ud800"]
    atoms += ["cwd ", "cwd/a", "2026 ", "2026", "2026-", "/2026", "(c)2026年31th", "25 Nov ", "٢", "12 a 10:11 "]

    def seconds(new: str, old: str) -> float:
        began = time.process_time()
        at = common_prefix(new, old)
        alike(new, old, at)
        finished(kind_of(new, old, at, NOW))
        return time.process_time() - began

    for atom in atoms:
        same = (atom * size)[:size]
        mixed = ["".join(draw.choices([atom, "x", str(i)], k=size // (len(atom) + 1))) for i in (1, 2)]
        for new, old in ((same[: size // 2] + "X" + same[size // 2 :], same), mixed, (mixed[0], same)):
            assert any(seconds(new, old) < 0.02 for _ in range(3)), atom


def own(number: int, length: int = 100) -> list[int]:
    return [number * 10_000 + index for index in range(length)]


def test_what_is_shared_is_what_comparing_all_prompts_of_the_same_finds():
    """Units of 64 tokens, so that few of them are learnt, and prompts of few units, so that many part anywhere."""
    draw, unit, deep = random.Random(2), 64, 0
    for _ in range(100):
        shared, prompts, learnt = SharedTokens(unit), {b"v": [], b"w": []}, {b"v": set(), b"w": set()}
        for _ in range(20):
            prompt = [token for _ in range(draw.randrange(8)) for token in [draw.randrange(2)] * unit]
            prompt += own(draw.randrange(1, 3), draw.randrange(unit))
            apart, usable = draw.choice([b"v", b"w", b"w"]), prompt[:-1]
            cuts = range(unit, len(usable) + 1, unit)
            parting = max(
                (cut for cut in cuts if any(prompt[:cut] == each[:cut] for each in prompts[apart])), default=0
            )
            expected = max((cut for cut in cuts if tuple(prompt[:cut]) in learnt[apart]), default=0)
            assert shared.look(apart, prompt) == expected, (prompt, prompts)
            if parting >= MIN_SHARED:
                learnt[apart].add(tuple(prompt[:parting]))
            prompts[apart].append(usable)
            deep += expected >= 3 * unit
    assert deep > 50


def test_memory_is_bounded_and_a_beginning_in_use_outlives_strangers():
    shared, found, head = SharedTokens(16, most=40), [], list(range(160))
    for number in range(1, 100):
        found.append(shared.look(b"w", head + own(2 * number)))
        assert shared.look(b"w", own(2 * number + 1, 200)) == 0
        assert len(shared._prefixes) <= 40
    assert found == [0, 0, *[160] * 97]
    assert shared.look(b"w", own(3, 200)) == shared.look(b"w", own(3, 200)) == 0  # forgotten meanwhile
    small = SharedTokens(16, most=8)
    assert [small.look(b"w", head) for _ in range(4)] == [0, 0, 0, 0], "its beginning is forgotten"
