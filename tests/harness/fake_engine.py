"""What a worker makes of a request, without a model: a prompt of one token per character; answers that follow from it.

With the plugin, it resolves hints on the tokens of its own template, keeps a state at each position, and reports both
in its feed, as `engine_patches/reporting/events_api.py` does.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from proxy.boundaries.boundary import resolve
from proxy.boundaries.divergence import common_prefix
from proxy.chat.chat import CHAT, COMPLETIONS, MESSAGES, RESPONSES
from proxy.chat.reader import HINTED, chat_in
from proxy.chat.responses import StoredResponses
from proxy.version import version

VERSION = version()  # of the plugin

MATCH_UNIT = 16

GENERATION = "<assistant>"

MAX_SEEN = 64  # prompts that are compared with later ones

Template = Callable[[Mapping[str, Any]], str]


def engine_info(
    of: str = VERSION,
    ahead: int = 0,
    connector: str = "",
    refused: str = "",
    reports: str = "",
    drafts: str = "",
    keep: str = "",
) -> str:
    """The line of `/metrics` by which a gateway knows the plugin; `ahead` as beside a draft head, in tokens.

    `connector`: vLLM's name of a KV connector beside which states are written inside a pass. `refused`: why no hint
    counts. `reports`: HOST:PORT where they are read. `drafts`: the gate of hints beside them. `keep`: whether it can be
    told what of a request it may keep.
    """
    beside = {"ahead": ahead or "", "connector": connector, "lane": "inside_pass" if connector else ""}
    beside |= {"refused": refused, "drafts": drafts, "keep": keep}
    beside |= {"block_size": "384", "match_unit": MATCH_UNIT, "version": of}
    labels = "".join(f'{name}="{value}",' for name, value in beside.items() if value)
    return f'seamark_engine_info{{{labels}reports="{reports}",vllm="0.32.0"}} 1.0\n'


def template(body: Mapping[str, Any]) -> str:
    """The prompt of a chat request: tools in front, and a marker before each message. Raises for what is no chat."""
    tools = body.get("tools")
    text = f"<tools>{json.dumps(tools)}" if tools else ""
    for message in body["messages"]:
        calls = message.get("tool_calls")
        text += f"<{message['role']}>{message.get('content') or ''}{json.dumps(calls) if calls else ''}"
    return text + (GENERATION if body.get("add_generation_prompt", True) else "")


def token_ids(text: str) -> list[int]:
    """A token for each character."""
    return list(map(ord, text))


SLEEP_STATES = {None: "awake", 0: "", 1: "weights_offloaded", 2: "discard_all"}


def sleep_state(*levels: int | None) -> str:
    """The lines of `/metrics` by which vLLM tells at which level each of its engines sleeps; None for one awake."""
    return "".join(
        f'vllm:engine_sleep_state{{engine="{engine}",model_name="m",sleep_state="{state}"}} {float(state == now)}\n'
        for engine, now in enumerate(SLEEP_STATES[level] for level in levels)
        for state in ("awake", "weights_offloaded", "discard_all")
    )


class Admitted(NamedTuple):
    """What the engine says of one request; lengths in tokens."""

    reason: str
    hit: int
    shared: int
    positions: Sequence[int]
    pin: str = ""  # what became of the wish to pin its prompt, or to release it

    @property
    def header(self) -> str:
        """The value of `x-seamark-outcome`."""
        told = f"{self.reason},{self.hit},{self.shared},{':'.join(map(str, self.positions))}"
        return f"{told},{self.pin}" if self.pin else told


class FakeEngine:
    """One boot of an engine and its feed."""

    def __init__(self, boot: str, ahead: int = 0) -> None:
        """`ahead`: tokens past a state that a prompt has to share to find it."""
        self.boot = f"feed of {boot}"
        self._ahead = ahead
        self._kept: list[list[Any]] = []  # events
        self._seen: dict[str, list[str]] = {}  # prompts, by cache salt
        self.read_to = 0  # what a gateway has read
        self.pinned: list[tuple[str, str]] = []  # cache salts and prompts

    @property
    def cursor(self) -> int:
        """Number of the last entry of the feed."""
        return len(self._kept)

    def admit(self, request_id: str, prompt: str, body: Mapping[str, Any], cached: int) -> Admitted:
        """A request is computed."""
        salt = str(body.get("cache_salt") or "")
        hint = hint_of(body)
        ids = token_ids(prompt)
        positions = resolve(hint, ids)
        seen = self._seen.setdefault(salt, [])
        shared = max((common_prefix(prompt, other) for other in seen), default=0)
        seen.append(prompt)
        del seen[:-MAX_SEEN]
        reason = "hit" if cached else "cold"
        usable = (max(position - self._ahead, 0) for position in positions)
        floored = sorted({position // MATCH_UNIT * MATCH_UNIT for position in usable} - {0})
        states = [[at, _state(salt, prompt[:at])] for at in floored]
        admitted = Admitted(reason, cached, shared // MATCH_UNIT * MATCH_UNIT, positions)
        admitted = admitted._replace(pin=self._pin(salt, prompt, body))
        self._kept.append(["admitted", request_id, reason, cached, admitted.shared, list(positions)])
        if admitted.pin:
            self._kept.append(["pinned", request_id, admitted.pin])
        if hint:
            self._kept.append(["came", request_id, len(ids), states])
        return admitted

    def clear(self) -> None:
        """The cache is emptied."""
        self.pinned.clear()
        self._kept.append(["cleared"])

    def replace_adapter(self, name: str) -> None:
        """Another adapter is loaded under a name: what the former one has left is gone."""
        self.pinned.clear()
        self._kept.append(["adapter", name])

    def _pin(self, salt: str, prompt: str, body: Mapping[str, Any]) -> str:
        xargs = body.get("vllm_xargs")
        pin = xargs.get("seamark_pin") if isinstance(xargs, dict) else None
        if pin == 0:
            self.pinned = [each for each in self.pinned if each != (salt, prompt)]
            return "released"
        if pin == 1 and (salt, prompt) not in self.pinned:
            if len(self.pinned) == 8:
                return "no_room"
            self.pinned.append((salt, prompt))
        return "pinned" if pin == 1 else ""

    def held(self, prompt: str, body: Mapping[str, Any]) -> int:
        """Tokens of `prompt` that lie before the deepest state kept for it; at least one token is left to compute."""
        salt = str(body.get("cache_salt") or "")
        states = {(at, name) for event in self._kept if event[0] == "came" for at, name in event[3]}
        return max((at for at, name in states if at < len(prompt) and name == _state(salt, prompt[:at])), default=0)

    def has_news(self, boot: str, after: int) -> bool:
        """Whether a reader at this place would learn anything."""
        if boot == self.boot:
            self.read_to = max(self.read_to, after)
        return boot != self.boot or after < self.cursor

    def feed(self, boot: str, after: int) -> dict[str, Any]:
        """What is later than `after`, or all of it for a reader of another boot's feed."""
        new = self._kept[after:] if boot == self.boot else self._kept
        reset = bool(boot) and boot != self.boot
        return {"boot": self.boot, "cursor": self.cursor, "events": new, "reset": reset}


def _state(salt: str, tokens: str) -> str:
    """The name of the state behind `tokens`."""
    return f"{hash((salt, tokens)):x}"


def hint_of(body: Mapping[str, Any]) -> list[Any]:
    """The hint in a request, as it arrived."""
    xargs = body.get("vllm_xargs")
    hint = xargs.get("seamark_boundaries") if isinstance(xargs, dict) else None
    return hint if isinstance(hint, list) else []


def prompt_of(path: str, body: Mapping[str, Any], render: Template) -> str | None:
    """The prompt of a request to any of the chat APIs; None if it has none that this worker understands."""
    try:
        if path == CHAT:
            return render(body)
        chat = chat_in(path, body, StoredResponses(0)) if path in HINTED else None
        if chat is None:
            return None
        if path == COMPLETIONS:
            return str(chat.messages[0]["content"])
        return render({**chat.body, "messages": chat.messages})
    except (AttributeError, KeyError, TypeError, ValueError):
        return None


class Computed(NamedTuple):
    """How long they are, and how they end."""

    words: int = 8  # events of a stream
    ending: str | None = "stop"  # of a choice

    def whole(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """An answer that is no stream."""
        name, salt = _name(body), body.get("cache_salt", "")
        text = f"{salt} {name} " * self.words
        message = {"role": "assistant", "content": text}
        shapes: dict[str, dict[str, Any]] = {
            CHAT: {"choices": [{"index": 0, "message": message, "finish_reason": self.ending}]},
            COMPLETIONS: {"choices": [{"index": 0, "text": text, "finish_reason": self.ending}]},
            MESSAGES: {"type": "message", "content": [{"type": "text", "text": text}], "stop_reason": "end_turn"},
            RESPONSES: {"object": "response", "status": "completed", "output": [{"type": "message", "text": text}]},
        }
        other = {"object": "list", "data": [{"embedding": [0.5], "of": text}]}
        return {"id": f"answer-{name}", "model": "m", **shapes.get(path, other)}

    def events(self, body: Mapping[str, Any]) -> list[bytes]:
        """The stream of a chat."""
        name, salt = _name(body), body.get("cache_salt", "")
        choices: list[dict[str, Any]] = [
            {"index": 0, "delta": {"content": f"{salt} {name} {number}"}, "finish_reason": None}
            for number in range(self.words)
        ]
        choices.append({"index": 0, "delta": {}, "finish_reason": self.ending})
        frames = [json.dumps({"id": f"answer-{name}", "choices": [each]}) for each in choices]
        return [f"data: {frame}\n\n".encode() for frame in (*frames, "[DONE]")]


def _name(body: Mapping[str, Any]) -> str:
    """Of a request, whatever the gateway tells the engine beside it."""
    asked = {name: value for name, value in body.items() if name != "vllm_xargs"}
    return hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest()
