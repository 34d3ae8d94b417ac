"""A changed prefix is named: the message, tool or setting where a request leaves the nearest recent one."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import get_args

import pytest

from proxy.boundaries.layout import layout_of
from proxy.boundaries.token_ids import common_prefix
from proxy.chat.chat import CHAT, MESSAGES
from proxy.chat.reader import chat_in, chat_request
from proxy.chat.responses import StoredResponses
from proxy.observability.cures import CHANGE_TEXT
from proxy.observability.request_diff import (
    ENTRY_BYTES,
    MAX_REQUESTS,
    MAX_TOOL_BYTES,
    MESSAGE_BYTES,
    SETTINGS,
    PrefixChange,
    RememberedRequest,
    RequestMemory,
)
from proxy.observability.volatile_text import TextKind
from tests.harness.changed_requests import changed_requests
from tests.harness.steps import finished


def remembering(size: int) -> RequestMemory:
    """Requests of November 2026."""
    return RequestMemory(size, now=lambda: 1795600000.0)


def as_recent(body) -> RememberedRequest:
    return RememberedRequest(layout_of(chat_request(body), b"r"), len(json.dumps(body)))


PROMPT = 1000  # tokens


def changed(*bodies):
    """Where the last of these requests leaves one of those before it; its engine has seen nothing like it."""
    recent = remembering(10_000_000)
    for body in bodies:
        last = as_recent(body)
        recent.add(last)
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


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (messages(LONG, "First?"), messages(LONG, "Second?")),
        (messages(LONG, "First?"), messages(LONG, "First?", "One.", "Second?")),
        (messages(LONG, "First?", "One.", "Second?"), messages(LONG, "First?", "Uno.", "Another?")),
        (messages(LONG, "a" * 900, "ok", "sum up"), messages(LONG, "b" * 900, "ok", "sum up")),
        (messages(LONG, "First?"), messages("Nothing in common with it at all. " * 9, "Other?")),
    ],
)
def test_another_request_is_no_change(first, second):
    assert changed({"messages": first}, {"messages": second}) is None


def test_the_salt_alone_is_told_apart():
    body = {"messages": messages(LONG, "First?")}
    change = changed({**body, "cache_salt": "a"}, {**body, "cache_salt": "b"})
    assert change.is_salt and change.lost > 0.8 * PROMPT
    shown = change.as_json(excerpts=True)
    assert shown["before"] is None and shown["now"] is None


def test_nothing_is_kept_where_no_text_may_be():
    recent = remembering(0)
    one = as_recent({"messages": messages(LONG, "First?")})
    recent.add(one)
    assert recent.held == 0 and finished(recent.seek_change(one, PROMPT, 0)) is None


RULES = "Keep clear of the bar at low water, and call the lock an hour before you are there. " * 40

DAYS = ("Sun Nov 22 2026", "Mon Nov 23 2026")

TOOLS = [{"type": "function", "function": {"name": name, "description": LONG}} for name in ("wind", "tide", "ice")]


def fog(description: str) -> list[dict]:
    """The tools, one of which is said to do something else."""
    return [TOOLS[0], {"type": "function", "function": {"name": "fog", "description": description}}, *TOOLS[1:]]


FOG = len('{"type":"function","function":{"name":"fog","description":"')

AT_NOON, LATER = (messages(f"{LONG}It is {time} now. {LONG}", LONG, "Aye.", "Tide?") for time in ("12:05", "18:21"))

THINKS = {"role": "assistant", "content": None, "reasoning": LONG, "tool_calls": [{"function": {"name": "wind"}}]}

TURNED = [*messages(LONG, LONG), THINKS, {"role": "tool", "content": LONG}]

TURNED_AGAIN = [*TURNED[:2], {**THINKS, "reasoning": "Well."}, TURNED[3]]


@pytest.mark.parametrize(
    ("first", "second", "what", "position", "role", "kind", "character"),
    [
        # Of messages; all kinds of text are in test_volatile_text.py.
        (AT_NOON, LATER, "message", 0, "system", "times", len(f"{LONG}It is 1")),
        (messages(f"{LONG} One.", LONG), messages(f"{LONG} Two.", LONG), "message", 0, "system", None, len(LONG) + 1),
        (messages(LONG, "Ann?", LONG, "Q"), messages(LONG, "Bo?", LONG, "Q"), "message", 1, "user", None, 0),
        (TURNED, TURNED_AGAIN, "message", 2, "assistant", "thinking_history", None),
        (TURNED, [*TURNED[:2], *TURNED[:1], *TURNED[2:]], "message", 2, "system", "system_moved", None),
        # Of tools: their order, that of their keys, and what they say.
        (TOOLS, TOOLS[::-1], "tool", 0, "ice", "tools_sorted", None),
        (TOOLS, [TOOLS[0], dict(reversed(TOOLS[1].items())), TOOLS[2]], "tool", 1, "tide", "tool_keys_sorted", 2),
        (TOOLS, TOOLS[1:], "tool", 0, "tide", None, None),
        (TOOLS, TOOLS[:-1], "tool", 2, "ice", None, None),
        (TOOLS[:-1], TOOLS, "tool", 2, "ice", None, None),
        (
            fog(f"It is {DAYS[0]}. {LONG}"),
            fog(f"It is {DAYS[1]}. {LONG}"),
            "tool",
            1,
            "fog",
            "dates",
            FOG + len("It is "),
        ),
        (fog(f"{LONG}Knots"), fog(f"{LONG}Miles"), "tool", 1, "fog", None, FOG + len(LONG)),
    ],
)
def test_the_first_difference_is_named(first, second, what, position, role, kind, character):
    def body(part):
        return {"messages": messages(LONG, "Q"), "tools": part} if part[0].keys() >= {"type"} else {"messages": part}

    change = changed(body(first), body(second))
    assert change[:5] == (what, position, role, character, kind)


def test_text_is_shown_only_where_excerpts_are_on():
    change = changed(*({"messages": messages(f"{LONG}secret {word}", LONG)} for word in ("one", "two")))
    assert "secret" not in str(change.as_json(excerpts=False)) and "secret two" in str(change.as_json(excerpts=True))


def test_of_several_versions_of_a_chat_the_nearest_is_named():
    text = LONG + "Speak of the {} alone. " + LONG
    near = messages(text.format("tide"), "First?", "One.", "Second?")
    far = messages(text.format("wind"), "Uno?" * 20, "Another one.", "Third?")
    now = messages(text.format("time"), "First?", "One.", "Second?")
    for others in ([near, far], [far, near]):
        change = changed(*({"messages": other} for other in (*others, now)))
        assert change.old == near[0]
        assert change.characters == len(LONG + "Speak of the ti")


@pytest.mark.parametrize("name", [each for each in SETTINGS if each != "model"])
def test_a_changed_setting_is_named_whatever_is_asked_next(name):
    bodies = [{"messages": messages(LONG, f"{word}?"), "tools": TOOLS, name: word} for word in ("One", "Two")]
    for body in bodies:
        without = {field: value for field, value in body.items() if field != name}
        change = changed(without, bodies[1])
        assert (change.what, change.role, change.is_salt) == ("setting", name, name == "cache_salt")
    change = changed(*bodies)
    assert (change.what, change.role, change.is_salt) == ("setting", name, name == "cache_salt")
    assert change.lost == pytest.approx(PROMPT, abs=20)  # but for the question


def test_another_model_shares_nothing_whatever_else_differs():
    body = {"messages": messages(LONG, "First?"), "tools": TOOLS, "tool_choice": "auto"}
    assert changed({**body, "model": "a"}, {**body, "model": "b", "tool_choice": "none"}) is None


def test_under_another_salt_a_changed_setting_costs_nothing():
    body = {"messages": messages(LONG, "First?"), "tools": TOOLS}
    first, second = (
        {**body, "cache_salt": salt, "tool_choice": choice} for salt, choice in (("a", "auto"), ("b", "none"))
    )
    assert changed(first, second) is None


def test_a_change_as_the_page_shows_it():
    change = changed(*({"messages": messages(f"{LONG}{name}, at 9:05", LONG)} for name in ("Ann", "Bo")))
    shown = {"what": "message", "index": 0, "role": "system", "token": 0, "characters": len(LONG), "lost": change.lost}
    assert change.as_json(excerpts=False) == {**shown, "kind": None, "text": None, "cure": None}
    told = change._replace(kind="times", role="r" * 99).as_json(excerpts=True)
    assert (told["text"], told["cure"]) == CHANGE_TEXT["times"] and told["role"] == "r" * 64
    assert (told["before"], told["now"]) == (f"{LONG[-40:]}Ann, at 9:05", f"{LONG[-40:]}Bo, at 9:05")


def asked(memory: RequestMemory, *bodies, owner: str | None = None, path: str = CHAT) -> PrefixChange | None:
    """The change of the last of these requests, each added when the one before it has been answered."""
    change = None
    for body in bodies:
        chat = chat_in(path, body, StoredResponses(0))
        text = json.dumps(body)
        last = RememberedRequest(layout_of(chat, b"r"), len(text), owner)
        memory.add(last)
        last.prompt = len(text) // 4
        change = finished(memory.seek_change(last, last.prompt, 0))
    return change


def dated(place: str, day: str, *turns: str):
    """A chat whose system prompt names the day at its head, in its middle or at its end."""
    says = f"Today is {day}. "
    system = {"first": says + RULES, "middle": RULES + says + RULES, "last": RULES + says}[place]
    return {"messages": messages(system, *turns)}


@pytest.mark.parametrize("place", ["first", "middle"])
def test_a_date_is_named_where_the_questions_have_nothing_in_common(place):
    change = asked(remembering(10**7), dated(place, DAYS[0], "High tide?"), dated(place, DAYS[1], "Which berth?"))
    before = len("Today is ") + (len(RULES) if place == "middle" else 0)
    assert (change.what, change.position, change.kind, change.characters) == ("message", 0, "dates", before)


def test_what_a_change_costs_is_what_both_have_but_for_what_any_earlier_prompt_began_with():
    """A token for each character: the engine says that so many are shared."""
    memory = remembering(10**7)
    asked(memory, dated("middle", DAYS[0], "High tide?"))
    body = dated("middle", DAYS[1], LONG)
    prompt, before = sum(len(each["content"]) for each in body["messages"]), len(RULES) + len("Today is ")
    last = as_recent(body)
    memory.add(last)
    for shared in (0, before, before + 1000):
        change = finished(memory.seek_change(last, prompt, shared))
        assert change.lost == pytest.approx(2 * len(RULES) - shared, abs=100) and change.token == shared
    assert finished(memory.seek_change(last, prompt, prompt - len(LONG))) is None


def test_tools_are_lost_behind_a_system_prompt_only_if_the_template_renders_them_there():
    memory = remembering(10**7)
    for day in DAYS:
        body = {**dated("last", day, "High tide?" if day == DAYS[0] else "Which berth?"), "tools": TOOLS}
        last = as_recent(body)
        memory.add(last)
    prompt, tools = len(RULES) + len(json.dumps(TOOLS)), len(json.dumps(TOOLS))
    assert finished(memory.seek_change(last, prompt, len(RULES))).lost == pytest.approx(tools, abs=100)
    assert finished(memory.seek_change(last, prompt, prompt - 20)) is None


def test_a_date_at_the_end_costs_a_conversation_its_history():
    first, turns = "What is the way in? " * 20, ("The buoys lead you. " * 20, "And at night?")
    memory = remembering(10**7)
    change = asked(memory, dated("last", DAYS[0], first), dated("last", DAYS[1], first, *turns))
    assert change.kind == "dates"
    assert asked(memory, dated("last", "Tue Nov 24 2026", "Another question?")) is None  # nothing was lost


@pytest.mark.parametrize("place", ["first", "middle", "last"])
def test_the_turns_after_a_change_have_not_changed(place):
    """The conversation's own predecessor is what each turn continues; older sessions are not its business."""
    memory, turns = remembering(10**7), ["What is the way in? " * 20]
    asked(memory, dated(place, DAYS[0], *turns))
    turns += ["The buoys lead you. " * 20, "And at night?"]
    assert asked(memory, dated(place, DAYS[1], *turns)) is not None
    for number in range(5):
        turns += [f"Answer {number}. " * 20, f"Question {number}?"]
        assert asked(memory, dated(place, DAYS[1], *turns)) is None
        assert asked(memory, dated(place, DAYS[1], f"Another conversation {number}.")) is None


def test_in_a_burst_the_first_request_has_changed_and_the_others_share_its_beginning():
    memory = remembering(10**7)
    asked(memory, dated("first", DAYS[0], "High tide?"))
    burst = []
    for number in range(8):
        chat = chat_request(dated("first", DAYS[1], f"Berth {number}?"))
        burst.append(RememberedRequest(layout_of(chat, b"r"), 4000))
        memory.add(burst[-1])
    assert [finished(memory.seek_change(request, PROMPT, 0)) is not None for request in burst] == [True] + 7 * [False]


def test_a_change_of_which_a_third_request_knows_more_is_not_the_cause():
    memory, words = remembering(10**7), "Name the depth at each buoy. " * 20
    asked(memory, dated("first", DAYS[0], words))
    asked(memory, dated("first", DAYS[1], "High tide?"))
    assert asked(memory, dated("first", DAYS[1], words)) is None


def test_a_days_question_asked_again_the_next_day_differs_by_its_date():
    """As agents do that put a reminder with the date before the user's own words, in one message."""

    def body(day: str, question: str):
        parts = [{"type": "text", "text": f"<reminder>\n{LONG}\nToday's date is {day}.\n\n{LONG}</reminder>"}]
        return {
            "messages": [*messages(RULES), {"role": "user", "content": [*parts, {"type": "text", "text": question}]}]
        }

    memory = remembering(10**7)
    change = asked(memory, body("2026-11-22", "How do the events run?"), body("2026-11-23", "How do the events run?"))
    assert (change.position, change.kind) == (1, "dates")
    assert asked(memory, body("2026-11-23", "What is a lock?")) is None
    ask = f"What is the tide on {{}}? Answer like this: {LONG}"
    assert (
        asked(memory, *({"messages": messages(RULES, ask.format(day))} for day in ("2026-11-22", "2026-11-23"))) is None
    )


def test_a_prompt_of_one_message_that_begins_with_the_time_is_recognised():
    bodies = [{"messages": [{"role": "user", "content": f"[{time}] {RULES}Which berth?"}]} for time in ("9:05", "9:06")]
    change = asked(remembering(10**7), *bodies)
    assert (change.kind, change.position) == ("times", 0) and change.lost > len(RULES) // 5


THOUGHT = [
    {"role": "user", "content": "Fix the rounding."},
    {"role": "assistant", "content": "I look.", "reasoning": "Let me look at the file first. " * 20},
    {"role": "tool", "content": "round(x)" * 20, "tool_call_id": "c"},
]


def test_thinking_that_a_template_drops_is_named_by_what_is_missing():
    before = [*messages(RULES), *THOUGHT]
    after = [*before, {"role": "assistant", "content": "Done."}, {"role": "user", "content": "And now the other one."}]
    memory = remembering(10**7)
    assert asked(memory, {"messages": before}, {"messages": after}) is None
    last = next(reversed(memory._requests.values()))
    predecessor = last.continued.prompt

    def otherwise(shared: int) -> PrefixChange | None:
        return finished(memory.rendered_otherwise(last, shared))

    assert otherwise(predecessor - 5) is None  # all of it but the words that ask for an answer
    assert otherwise(16) is None  # an engine that has forgotten it
    change = otherwise(predecessor - 400)
    assert (change.kind, change.position, change.role) == ("thinking_history", 2, "assistant")
    assert (change.token, change.lost) == (predecessor - 400, 400)
    assert "truncate_history_thinking" in change.as_json(excerpts=True)["cure"]


def test_reminders_that_vllm_merges_into_the_system_prompt_are_named():
    loop = [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": "done"}]}]
    said = [{"role": "user", "content": "Go on."}, {"role": "assistant", "content": "Yes."}, *loop]
    first = {"system": RULES, "messages": said}
    second = {"system": RULES, "messages": [*said, {"role": "system", "content": "Use the list of tasks."}]}
    memory = remembering(10**7)
    assert asked(memory, first, second, path=MESSAGES) is None
    last = next(reversed(memory._requests.values()))
    change = finished(memory.rendered_otherwise(last, last.continued.prompt - 300))
    assert (change.kind, change.lost) == ("system_merged", 300)


def test_each_kind_has_a_cure_and_a_row_in_the_readme():
    readme = (Path(__file__).parents[3] / "proxy" / "README.md").read_text()
    told = {
        word for line in readme.splitlines() if line.startswith("| `") for word in line.split("|")[1].split("`")[1::2]
    }
    assert set(get_args(TextKind)) <= set(CHANGE_TEXT) <= told
    for text in CHANGE_TEXT.values():
        assert text.cure[0].isupper() and text.cure[-1] == "."


def test_of_two_owners_neither_learns_of_the_other():
    memory = remembering(10**7)
    longer = dated("first", DAYS[0], "High tide?", "At nine.", "And then?")
    asked(memory, dated("first", DAYS[0], "High tide?"), owner="ann")
    assert asked(memory, dated("first", DAYS[1], "High tide?"), owner="bo") is None
    assert asked(memory, longer, owner="cy") is None
    assert next(reversed(memory._requests.values())).continued is None
    assert asked(memory, longer, owner="ann") is None
    assert next(reversed(memory._requests.values())).continued is not None


def test_a_request_whose_predecessor_is_forgotten_has_lost_nothing_by_an_older_one():
    """What it shares with its predecessor, the engine or the index of prefixes still knows."""
    memory = remembering(10**7)
    old, new = (dated("last", day, "What is the way in? " * 20) for day in DAYS)
    asked(memory, old, new)
    for number in range(2 * MAX_REQUESTS):
        asked(memory, {"messages": messages(f"Another {number}.", "Q")})
    asked(memory, old)
    longer = [*new["messages"], {"role": "assistant", "content": "In."}, {"role": "user", "content": "And?"}]
    last = as_recent({"messages": longer})
    memory.add(last)
    shared, prompt = (sum(len(each["content"]) for each in part) // 4 for part in (new["messages"], longer))
    assert finished(memory.seek_change(last, prompt, shared)) is None


def test_of_honest_hits_none_gets_a_change():
    """Conversations, fan-outs, questions about documents and agents' loops, mixed; some system prompts say the day."""
    draw = random.Random(9)
    words = RULES.split()

    def text(length: int) -> str:
        return " ".join(draw.choices(words, k=length))

    memory, honest, before = remembering(10**6), 0, [""]
    apps = [f"Today is {DAYS[app % 2]}. {text(300)}" if app < 4 else text(300) for app in range(8)]
    documents = [text(400) for _ in range(3)]
    results = [text(80) for _ in range(4)]
    open_chats: list[dict] = []
    for system in apps:  # first sight of each
        asked(memory, {"messages": messages(system, "Hello?")})
        before.append(json.dumps({"messages": messages(system, "Hello?")}))
    while honest < 400:
        kind, system = draw.randrange(5), draw.choice(apps)
        if kind == 0:
            bodies = [{"messages": messages(system, text(30))}]
            open_chats += bodies
        elif kind == 1 and open_chats:  # the next turn
            chat = draw.choice(open_chats[-20:])
            chat["messages"] = [
                *chat["messages"],
                {"role": "assistant", "content": text(40)},
                {"role": "user", "content": draw.choice([text(20), f"Step {honest}?", "Go on."])},
            ]
            bodies = [chat]
        elif kind == 2:  # a fan-out: one list of things to do, a number and the same words around it
            bodies = [{"messages": messages(system, f"Item {i} of {honest}: {RULES[:400]}")} for i in range(6)]
        elif kind == 3:  # the same document behind the system prompt, another question
            document = draw.choice(documents)
            bodies = [{"messages": messages(system, f"{document}\n\n{text(9)}, by 2026-11-{draw.randrange(10, 30)}?")}]
        else:  # an agent's loop: other tasks see the same files
            turns = [*messages(system), {"role": "user", "content": f"Task {honest}: {text(12)}"}]
            bodies = [{"messages": list(turns)}]
            for step in range(3):
                call = {"id": "c", "type": "function", "function": {"name": "read", "arguments": f'{{"n": {step}}}'}}
                turns += [{"role": "assistant", "content": "", "tool_calls": [call]}]
                turns += [{"role": "tool", "tool_call_id": "c", "content": draw.choice(results)}]
                bodies.append({"messages": list(turns)})
        for body in bodies:
            honest += 1
            chat = as_recent(dict(body))
            memory.add(chat)
            prompt = json.dumps(body)
            shared = max(common_prefix(prompt, other) for other in before)
            before.append(prompt)
            change = finished(memory.seek_change(chat, len(prompt) // 4, shared // 4))
            assert change is None, (kind, change and change._replace(old=None, new=None))


def test_what_is_remembered_is_bounded_in_bytes_and_in_number():
    recent = remembering(20_000)
    added = [as_recent({"messages": messages(f"{number} " + "x" * 500, "Q")}) for number in range(3 * MAX_REQUESTS)]
    for request in added:
        recent.add(request)
        kept = list(recent._requests.values())
        assert recent.held == sum(each.size for each in kept) <= 20_000
        assert kept[-1] is request
    assert 1 < len(kept) < MAX_REQUESTS  # the bytes were the limit
    recent.add(as_recent({"messages": messages("x" * 30_000, "Q")}))
    assert list(recent._requests.values()) == kept  # a request that never fits leaves the others alone

    many = remembering(10_000_000)
    for request in added:
        many.add(request)
    assert list(many._requests.values()) == added[-MAX_REQUESTS:]
    assert many.held == sum(each.size for each in added[-MAX_REQUESTS:])


def test_a_request_that_continues_another_takes_its_place():
    recent = remembering(10_000_000)
    recent.add(as_recent({"messages": messages(LONG, "First?")}))
    longer = as_recent({"messages": messages(LONG, "First?", "One.", "Second?")})
    recent.add(longer)
    assert list(recent._requests.values()) == [longer]
    assert recent.held == longer.size


def tool(name: str, description: str) -> dict:
    return {"type": "function", "function": {"name": name, "description": description}}


def test_a_tool_behind_an_equal_one_that_says_something_else_is_not_one_in_another_order_of_keys():
    chat = messages(LONG, LONG, "tide?")
    first, second = ([tool("tide", LONG), tool("wind", f"{LONG} {word}")] for word in ("Knots", "Miles"))
    change = changed({"messages": chat, "tools": first}, {"messages": chat, "tools": second})
    assert change is not None and (change.what, change.position) == ("tool", 1)
    assert change.kind != "tool_keys_sorted"


def test_a_tool_more_at_the_end_is_named():
    chat = messages(LONG * 3, LONG * 3, "tide?")
    one, two = tool("tide", LONG), tool("wind", LONG)
    change = changed({"messages": chat, "tools": [one]}, {"messages": chat, "tools": [one, two]})
    assert change is not None and (change.what, change.position) == ("tool", 1)


def continued_by(before: list, after: list, prompt: int = 1000) -> tuple[RequestMemory, RememberedRequest]:
    """A request that continues one with a prompt of so many tokens."""
    memory = remembering(10**7)
    first, last = as_recent({"messages": before}), as_recent({"messages": after})
    memory.add(first)
    first.prompt = prompt
    memory.add(last)
    return memory, last


NEXT = [{"role": "assistant", "content": "Done."}, {"role": "user", "content": "And now the other one."}]


@pytest.mark.parametrize(("missing", "is_named"), [(63, False), (64, True), (500, True)])
def test_what_a_template_writes_around_an_answer_is_no_change_of_the_history(missing, is_named):
    memory, last = continued_by([*messages(RULES), *THOUGHT], [*messages(RULES), *THOUGHT, *NEXT])
    change = finished(memory.rendered_otherwise(last, 1000 - missing))
    assert (change is not None) is is_named
    assert change is None or (change.token, change.lost, change.what, change.role) == (
        1000 - missing,
        missing,
        "message",
        "assistant",
    )


SAID = [{"role": "user", "content": "Fix the rounding."}, {"role": "assistant", "content": "I look." * 20}]


@pytest.mark.parametrize(
    ("before", "added"),
    [
        (THOUGHT, NEXT[:1]),  # the loop is not over: no user has spoken
        (SAID, NEXT),  # nobody thought
        ([*THOUGHT[:2], {"role": "user", "content": "Next."}, *SAID[1:]], NEXT),  # not since the user spoke last
        ([SAID[0], {**SAID[1], "reasoning": ""}], NEXT),
        ([SAID[0], {**SAID[1], "reasoning": 7}], NEXT),
        (THOUGHT, [NEXT[0], {"role": "system", "content": "Use the list."}]),  # merged by the messages API alone
    ],
)
def test_without_thinking_of_a_loop_that_is_over_nothing_is_dropped(before, added):
    memory, last = continued_by([*messages(RULES), *before], [*messages(RULES), *before, *added])
    assert finished(memory.rendered_otherwise(last, 500)) is None


def test_a_request_that_continues_none_has_no_history_that_was_rendered_before():
    memory, last = remembering(10**7), as_recent({"messages": [*messages(RULES), *THOUGHT, *NEXT]})
    memory.add(last)
    assert finished(memory.rendered_otherwise(last, 0)) is None


def test_thinking_is_found_by_either_name_and_behind_the_message_that_began_the_loop():
    for name in ("reasoning", "reasoning_content"):
        thought = [THOUGHT[0], {"role": "assistant", "content": "I look.", name: "Let me see. " * 20}]
        memory, last = continued_by([*messages(RULES), *thought], [*messages(RULES), *thought, *NEXT])
        change = finished(memory.rendered_otherwise(last, 700))
        assert change is not None and (change.kind, change.position) == ("thinking_history", 2)
    without_user = [*messages(RULES), *THOUGHT[1:]]  # a prefilled history
    memory, last = continued_by(without_user, [*without_user, *NEXT])
    change = finished(memory.rendered_otherwise(last, 700))
    assert change is not None and change.position == 1


ODD = {
    "tools": ["text", {"function": 7}, {"function": {"name": 7}}, {"function": {"name": "wind"}}],
    "messages": [{"role": "system", "content": "x"}, {"role": 7, "content": "y"}, {"role": "user", "content": None}],
}


def test_parts_that_no_engine_takes_have_no_name_and_those_behind_the_last_one_are_none():
    request = as_recent(ODD)
    finished(request.prepare())
    roles = [None, None, None, "wind", "system", None, "user", None]
    assert [request.role(index) for index in range(8)] == roles
    assert [request.part(index) for index in range(8)] == [*ODD["tools"], *ODD["messages"], None]
    tools = ['"text"', '{"function":7}', '{"function":{"name":7}}', '{"function":{"name":"wind"}}']
    assert [request.text(index) for index in range(8)] == [*tools, "x", "y", None, None]


def test_parts_are_hashed_once_and_a_tool_that_nobody_looks_into_has_no_text():
    small, large = ({"function": {"name": "x" * size}} for size in (MAX_TOOL_BYTES - 24, MAX_TOOL_BYTES - 23))
    request = as_recent({"messages": messages("x", "y"), "tools": [small, large]})
    assert request.parts == ()
    finished(request.prepare())
    parts = request.parts
    assert [part.size for part in parts[:2]] == [MAX_TOOL_BYTES, MAX_TOOL_BYTES + 1]
    assert request.text(0) is not None and request.text(1) is None
    finished(request.prepare())
    assert request.parts is parts


def test_the_size_of_a_message_is_that_of_its_texts_its_thinking_and_its_calls():
    said = [
        {"role": "user", "content": "x" * 100},
        {"role": "user", "content": [{"type": "text", "text": "x" * 60}, {"type": "text", "text": "x" * 40}, {"a": 1}]},
        {"role": "assistant", "content": None, "reasoning": "x" * 70, "reasoning_content": "x" * 30},
        {"role": "assistant", "content": "x", "tool_calls": [{"id": "c"}]},
        {"role": "user", "content": 7},
    ]
    request = as_recent({"messages": said})
    finished(request.prepare())
    assert [part.size for part in request.parts] == [120, 120, 120, 21 + len('[{"id":"c"}]'), 20]


def test_what_a_request_takes_counts_twice_where_it_was_converted():
    body = {"messages": messages("x", "y")}
    plain = RememberedRequest(layout_of(chat_request(body), b"r"), 1000)
    assert plain.size == ENTRY_BYTES + 1000 + 2 * MESSAGE_BYTES
    native = chat_in(MESSAGES, {"system": "x", "messages": body["messages"][1:]}, StoredResponses(0))
    converted = RememberedRequest(layout_of(native, b"r"), 1000)
    assert converted.size == ENTRY_BYTES + 2000 + 2 * MESSAGE_BYTES


def test_an_excerpt_shows_what_is_around_the_difference():
    old, new = ("a" * 100 + word + "b" * 100 for word in ("old", "new"))
    change = PrefixChange("message", 1, "r" * 100, 101, None, 7, 9, {"content": old}, {"content": new})
    shown = change.as_json(excerpts=True)
    assert (shown["before"], shown["now"]) == (old[61:141], new[61:141])
    assert shown["role"] == "r" * 64 and (shown["index"], shown["token"], shown["lost"]) == (1, 7, 9)
    assert (shown["characters"], shown["kind"], shown["text"], shown["cure"]) == (101, None, None, None)
    assert {"before", "now"}.isdisjoint(change.as_json(excerpts=False))
    early = change._replace(characters=None, old=None, new={"function": {"name": "wind"}}, role=None)
    shown = early.as_json(excerpts=True)
    assert (shown["before"], shown["now"], shown["role"]) == (None, '{"function":{"name":"wind"}}', None)
    assert change._replace(characters=10).as_json(excerpts=True)["now"] == new[:80]


@pytest.mark.parametrize(("shared", "lost"), [(0, None), (968, 32), (969, None), (2000, None)])
def test_a_change_is_named_if_it_cost_32_tokens_beyond_what_any_prompt_began_with(shared, lost):
    body = {"messages": messages(LONG, "First?")}
    memory = remembering(10**7)
    memory.add(as_recent({**body, "cache_salt": "a"}))
    last = as_recent({**body, "cache_salt": "b"})
    memory.add(last)
    whole = finished(memory.seek_change(last, 1000, 0))
    change = finished(memory.seek_change(last, 1000, shared))
    assert whole is not None and whole.lost == 1000
    assert (change.lost if change is not None else None) == (1000 if not shared else lost)


def test_into_a_tool_that_is_too_long_nobody_looks_for_another_order_of_keys():
    chat = messages(LONG * 100, LONG * 1000, "tide?")
    kinds = []
    for size in (100, MAX_TOOL_BYTES):
        one = tool("wind", "x" * size)
        other = {"function": dict(reversed(one["function"].items())), "type": "function"}
        change = changed({"messages": chat, "tools": [one]}, {"messages": chat, "tools": [other]})
        assert change is not None and (change.what, change.position) == ("tool", 0)
        kinds.append((change.kind, change.characters is None))
    assert kinds == [("tool_keys_sorted", False), (None, True)]


def test_a_request_knows_which_one_it_continues_and_how_long_that_was_if_its_worker_has_said_so():
    for prompt in (0, 700):
        memory = remembering(10**7)
        first, last = (as_recent({"messages": [*messages(RULES), *SAID, *more]}) for more in ([], NEXT))
        memory.add(first)
        first.prompt = prompt or first.prompt
        memory.add(last)
        assert last.continued == (3, prompt) and (first.number, last.number) == (1, 2)
        assert first.continued is None
