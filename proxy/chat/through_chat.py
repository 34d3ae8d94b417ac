"""/v1/messages for a worker that has none: the request goes to the chat API, and its answer comes back as a message.

vLLM's own route does the same in its process; requests, stop reasons and blocks are turned as it turns them (vLLM 0.33,
`entrypoints/anthropic/serving.py`), so that a client cannot tell which of the two has answered. But a call that was cut
short is a message here and an error 500 there, and a call without an id gets one that does not tell the time.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from typing import Any

from proxy.chat.anthropic import messages_request
from proxy.chat.chat import flag, listed
from proxy.http.json_body import loads

# Fields of a request that have the same meaning in both APIs, and by which name in the chat API.
_SAME = {
    "stop_sequences": "stop",
    **{name: name for name in ("temperature", "top_p", "top_k", "watermarking", "cache_salt", "vllm_xargs")},
    **{name: name for name in ("chat_template_kwargs", "kv_transfer_params", "ec_transfer_params")},
}

_OPENS, _DELTA, _ENDS = "content_block_start", "content_block_delta", "content_block_stop"


def chat_of(body: Mapping[str, Any], *, merges: bool = False) -> dict[str, Any]:
    """The request to the chat API that one to /v1/messages means; `merges`: all system messages are one, the first."""
    chat = messages_request(body)
    made = dict(chat.body) if chat is not None else {"model": body.get("model"), "messages": []}
    told = [message["content"] for message in made["messages"] if merges and message["role"] == "system"]
    if told:
        others = (message for message in made["messages"] if message["role"] != "system")
        made["messages"] = [{"role": "system", "content": "".join(told)}, *others]
    for theirs, ours in _SAME.items():
        if body.get(theirs) is not None:
            made[ours] = body[theirs]
    if body.get("max_tokens") is not None:
        made["max_tokens"] = made["max_completion_tokens"] = body["max_tokens"]
    choice, thinking, output = (_mapping(body.get(name)) for name in ("tool_choice", "thinking", "output_config"))
    if made.get("tools"):
        named = {"type": "function", "function": {"name": choice.get("name")}}
        kinds = {"any": "required", "none": "none", "tool": named}
        made["tool_choice"] = kinds.get(str(choice.get("type")), "auto")
    if flag(choice.get("disable_parallel_tool_use")):
        made["parallel_tool_calls"] = False
    if thinking.get("type") == "enabled" and thinking.get("budget_tokens") is not None:
        made["thinking_token_budget"] = thinking["budget_tokens"]
    if schema := _mapping(output.get("format")).get("schema"):
        kind = _mapping(output.get("format")).get("type")
        made["response_format"] = {"type": kind, "json_schema": {"name": kind, "schema": schema}}
    if flag(body.get("stream")):
        made |= {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    return made


def has_reminders(body: Mapping[str, Any]) -> bool:
    """Whether system messages stand within a request to /v1/messages, as Claude Code's."""
    return any(_mapping(message).get("role") == "system" for message in listed(body.get("messages")))


def error_of(answer: bytes, status: int) -> bytes:
    """What the chat API answered in place of a chat, as an error of Anthropic's."""
    try:
        parsed = loads(answer)
    except ValueError:
        parsed = None
    said = _mapping(parsed).get("error", parsed)
    told = {"message": said} if isinstance(said, str) else _mapping(said)
    message = told.get("message") or told.get("detail") or f"The worker answered {status}."
    return json.dumps({"type": "error", "error": _error({**told, "message": message})}).encode()


def message_of(answer: bytes) -> bytes:
    """A whole answer of the chat API as a message. Raises `ValueError` for what is none."""
    try:
        parsed = loads(answer)
        (choice, *_), blocks = parsed["choices"], []
        said = choice["message"]
        if thought := said.get("reasoning"):
            blocks.append({"type": "thinking", "thinking": thought, "signature": os.urandom(16).hex()})
        if text := said.get("content"):
            blocks.append({"type": "text", "text": text})
        may_run, are_complete = True, bool(calls := listed(said.get("tool_calls")))
        for call in calls:
            name, arguments = call["function"]["name"], call["function"].get("arguments") or ""
            given = _input(arguments)
            are_complete &= given is not None
            may_run &= given is not None or not arguments.strip()
            blocks.append({"type": "tool_use", "id": call["id"], "name": name, "input": given or {}})
        stopped = _stopped(choice.get("finish_reason"), choice.get("stop_reason"), bool(calls), are_complete)
        message = _message(parsed, blocks or [{"type": "text", "text": ""}], _usage(parsed.get("usage"))) | stopped
    except (KeyError, TypeError, ValueError, AttributeError):
        raise ValueError("The worker's answer is no chat completion.") from None
    if stopped["stop_reason"] == "tool_use" and not may_run:
        raise ValueError("The worker's tool call has arguments that are no JSON object.")
    return json.dumps(message).encode()


class MessageStream:
    def __init__(self) -> None:
        self._begun = b""  # of an event that is not complete
        self._has_opened = False
        self._is_over = False
        self._index = 0  # of the block that is open, or of the next one
        self._block = ""  # the kind of the one that is open
        self._call = ""  # id of the tool call that is open
        self._calls: dict[Any, str] = {}  # ids, by index
        self._arguments: str | None = None  # of the latest tool call
        self._text_behind = ""  # that came within a tool call
        self._finish: tuple[Any, Any] = (None, None)

    def events(self, piece: bytes) -> bytes:
        """What follows from the next bytes of the chat's stream."""
        *ended, self._begun = (self._begun + piece).split(b"\n")
        made = "".join(event for line in ended for event in self._line(line.strip()))
        return made.encode(errors="surrogatepass")

    def _line(self, line: bytes) -> Iterator[str]:
        if not line.startswith(b"data:"):
            return
        data = line.removeprefix(b"data:").strip()
        if data == b"[DONE]":
            if self._has_opened and not self._is_over:
                yield from self._close()
                yield _event("message_stop")
            self._is_over = True
            return
        try:
            chunk = json.loads(data)
            if isinstance(error := chunk.get("error"), dict):
                yield _event("error", error=_error(error))
                self._is_over = True
                return
            yield from self._chunk(chunk)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            yield _event("error", error={"type": "api_error", "message": "The worker's stream could not be read."})
            self._is_over = True

    def _chunk(self, chunk: Mapping[str, Any]) -> Iterator[str]:
        if not self._has_opened:
            self._has_opened = True
            message = _message(chunk, [], _usage(chunk.get("usage")))
            yield _event("message_start", message={**message, "stop_reason": None, "stop_sequence": None})
        if not chunk["choices"]:
            yield from self._close()
            finish, stop = self._finish
            has_calls = self._arguments is not None
            stopped = _stopped(finish or "stop", stop, has_calls, has_calls and _input(self._arguments) is not None)
            yield _event("message_delta", delta=stopped, usage=_usage(chunk.get("usage")))
            return
        choice = chunk["choices"][0]
        if choice.get("finish_reason") is not None:
            self._finish = choice["finish_reason"], choice.get("stop_reason")
        delta = choice["delta"]
        if thought := delta.get("reasoning"):
            yield from self._open("thinking", {"thinking": ""})
            yield self._delta("thinking_delta", thinking=thought)
        if text := delta.get("content"):
            if self._block == "tool_use":
                self._text_behind += text
            else:
                yield from self._open("text", {"text": ""})
                yield self._delta("text_delta", text=text)
        for call in listed(delta.get("tool_calls")):
            yield from self._called(call)

    def _called(self, call: Mapping[str, Any]) -> Iterator[str]:
        function = call.get("function") or {}
        if call.get("id") is not None:
            self._calls[call.get("index")] = call["id"]
            if self._call != call["id"] and function.get("name") is not None:
                yield from self._close()
                self._arguments = ""
                yield from self._open("tool_use", {"id": call["id"], "name": function["name"], "input": {}})
                self._call = call["id"]
        if (more := function.get("arguments")) and self._call and self._calls.get(call.get("index")) == self._call:
            self._arguments = (self._arguments or "") + more
            yield self._delta("input_json_delta", partial_json=more)

    def _open(self, kind: str, fields: Mapping[str, Any]) -> Iterator[str]:
        if self._block != kind or kind == "tool_use":
            yield from self._close()
            self._block = kind
            yield _event(_OPENS, index=self._index, content_block={"type": kind, **fields})

    def _delta(self, kind: str, **fields: str) -> str:
        return _event(_DELTA, index=self._index, delta={"type": kind, **fields})

    def _close(self) -> Iterator[str]:
        """End the block that is open, and give what came within it as a block of its own."""
        if self._block:
            if self._block == "thinking":
                yield self._delta("signature_delta", signature=os.urandom(16).hex())
            yield _event(_ENDS, index=self._index)
            self._index += 1
            self._block = self._call = ""
        if behind := self._text_behind:
            self._text_behind = ""
            yield from self._open("text", {"text": ""})
            yield self._delta("text_delta", text=behind)
            yield from self._close()


def _event(kind: str, **fields: Any) -> str:
    return f"event: {kind}\ndata: {json.dumps({'type': kind, **fields})}\n\n"


def _error(told: Mapping[str, Any]) -> dict[str, str]:
    return {"type": str(told.get("type") or "api_error"), "message": str(told.get("message") or "")}


def _message(answer: Mapping[str, Any], blocks: list[Any], usage: Mapping[str, int]) -> dict[str, Any]:
    own = {"id": answer.get("id"), "type": "message", "role": "assistant", "content": blocks}
    return {**own, "model": answer.get("model"), "usage": usage}


def _usage(usage: Any) -> dict[str, int]:
    """Anthropic's input tokens are those neither read from the cache nor written to it."""
    usage = _mapping(usage)
    details, told = _mapping(usage.get("prompt_tokens_details")), {}
    fresh = usage.get("prompt_tokens") or 0
    for ours, theirs in (("cached_tokens", "cache_read"), ("created_cache_tokens", "cache_creation")):
        if (tokens := details.get(ours)) is not None:
            fresh -= tokens
            told[f"{theirs}_input_tokens"] = tokens
    return {"input_tokens": max(0, fresh), "output_tokens": usage.get("completion_tokens") or 0, **told}


def _stopped(finish: Any, stop: Any, has_calls: bool, are_complete: bool) -> dict[str, Any]:
    """Why it ended. A stop string wins unless the calls are complete: a call that it cut short must not run."""
    reason = "tool_use" if has_calls or finish == "tool_calls" else "end_turn"
    if isinstance(stop, str) and not are_complete:
        reason = "stop_sequence"
    kept = {"length": "max_tokens", "stop": reason, "tool_calls": reason}.get(finish)
    return {"stop_reason": kept, "stop_sequence": stop if kept == "stop_sequence" else None}


def _input(arguments: Any) -> dict[str, Any] | None:
    """A tool call's arguments as an object; None: they are none, or not all there."""
    try:
        given = loads(arguments)
    except ValueError:
        return None
    return {} if given is None else given if isinstance(given, dict) else None


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}
