"""Which requests may get the bytes of an earlier answer, what tells them apart, and which answers may be kept.

Only what is certain to come out the same again: greedy sampling, or one by a seed that the API of the worker hands to
its sampler, and a prompt that stands in the body itself.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from proxy.chat.chat import MESSAGES, RESPONSES, flag, listed
from proxy.chat.reader import EMBEDDINGS, HINTED
from proxy.http import asgi
from proxy.pipeline.exchange import Exchange, choices_of

CACHEABLE = HINTED.keys() | {EMBEDDINGS}
NO_SEED = -1  # for vLLM
HEADER = b"x-seamark-cache"
ALLOW = b"allow"  # value of the header in a request
ANY_MODEL = "*"

# Request headers on which an answer may depend; without keys of the gateway's own, also who asks the worker.
TOLD_APART = frozenset(
    b"accept accept-encoding anthropic-beta anthropic-version authorization content-encoding content-type cookie "
    b"openai-beta origin x-api-key".split()
)

DIGEST_BYTES = 32

# Of a worker's answer: what is about its bytes, whoever gets them. Anything else may be about one request alone.
KEPT = frozenset(
    b"access-control-allow-credentials access-control-allow-origin access-control-expose-headers cache-control "
    b"content-language content-length content-type date vary".split()
)

# What lies at an address may change; what a body holds itself does not. A key that is escaped may be any of these.
_REMOTE = re.compile(rb'"(?:(?:image_|video_|audio_|file_)?url|[a-z_]*\\u00[0-7][^"]*)"\s*:\s*"(?!data:)')

_DONE = b"[DONE]"

# An answer that is no stream, or a line of one that is, is parsed up to this size: that takes some milliseconds.
LARGEST_JUDGED = 2**20

_FINISH = re.compile(rb'"(?:finish|stop)_reason"\s*:\s*"')


class Directives(NamedTuple):
    """What a `Cache-Control` says (RFC 9111, 5.2)."""

    no_store: bool = False
    no_cache: bool = False
    private: bool = False
    max_age: float | None = None  # seconds


def directives_in(headers: Iterable[tuple[bytes, bytes]]) -> Directives:
    """All `Cache-Control` headers as one (names in lower case). A `max-age` that is no number counts as 0."""
    told: dict[str, str] = {}
    for name, value in headers:
        if name == b"cache-control":
            for part in value.decode("latin-1").lower().split(","):
                word, _, argument = part.strip().partition("=")
                told[word.strip()] = argument.strip().strip('"')
    age = told.get("max-age")
    seconds = None if age is None else float(age) if age.isdecimal() else 0.0
    return Directives("no-store" in told, "no-cache" in told, "private" in told, seconds)


def is_allowed(headers: Iterable[tuple[bytes, bytes]], model: Any, models: tuple[str, ...]) -> bool:
    """Whether the client's header or the operator's list of `models` lets the cache answer."""
    if ANY_MODEL in models or (isinstance(model, str) and model in models):
        return True
    return any(name == HEADER and value.strip().lower() == ALLOW for name, value in headers)


def is_repeatable(exchange: Exchange) -> bool:
    """Whether the same request is certain to mean the same, and to get an answer as good the second time."""
    head, body, parsed = exchange.head, exchange.body, exchange.body.parsed
    if head.method != "POST" or head.path not in CACHEABLE or not parsed or _REMOTE.search(body.raw):
        return False
    if head.path == EMBEDDINGS:
        return True
    if head.path == RESPONSES:
        # Tools that the worker calls by itself: a search finds something else tomorrow.
        own = any(not isinstance(each, dict) or each.get("type") != "function" for each in listed(parsed.get("tools")))
        if exchange.response_id is not None or parsed.get("background") or own:
            return False
    temperature = parsed.get("temperature")  # an absent one is the model's to choose
    is_greedy = type(temperature) in (int, float) and temperature == 0
    is_seeded = type(parsed.get("seed")) is int and parsed["seed"] != NO_SEED
    takes_seed = HINTED[head.path].takes_seed and flag(parsed.get("use_beam_search")) is False  # of beams takes none
    return is_greedy or (is_seeded and takes_seed)


def digest(exchange: Exchange, secret: bytes) -> bytes:
    """The request's name in the cache, which nobody can steer without `secret`: of `DIGEST_BYTES` bytes.

    It covers whose prefixes the request shares, API, query, headers of `TOLD_APART` and the body as it goes to workers.
    """
    head, body = exchange.head, exchange.body
    hashed = hashlib.blake2b(key=secret, digest_size=DIGEST_BYTES)
    parts = [
        b"" if head.key is None else head.key.salt.encode(),
        # A response can be continued by the key that asked for it, and by no other of its group.
        (head.owner or "").encode(errors="surrogatepass") if head.path == RESPONSES else b"",
        head.target.encode("latin-1"),
        b"stripped" if body.strips_usage else b"",
        *(part for header in head.headers if header[0] in TOLD_APART for part in header),
        body.encoded(()),
    ]
    for part in parts:
        hashed.update(len(part).to_bytes(8, "big"))
        hashed.update(part)
    return hashed.digest()


def may_keep(headers: asgi.HeaderList) -> bool:
    """Whether a worker's answer with these headers may be given to others who ask the same."""
    told = directives_in(headers)
    if told.no_store or told.no_cache or told.private:
        return False
    varies = {name.strip() for key, value in headers if key == b"vary" for name in value.lower().split(b",")}
    return varies <= TOLD_APART and all(key not in (b"content-encoding", b"set-cookie") for key, _ in headers)


class Ending:
    """Finds out, by the pieces of an answer as they come, whether each choice of it ends by itself.

    One that was cut off, aborted, or broken by an error does not, nor does one that is not what its API answers. It
    takes as long as a piece has bytes.
    """

    def __init__(self, path: str, asked: Mapping[str, Any], is_stream: bool) -> None:
        """`asked` is the request."""
        self._path, self._asked, self._is_stream = path, asked, is_stream
        self._rest = bytearray()  # of a stream a line that is not complete, else all so far
        self._is_odd = False
        self._ended: dict[Any, Any] = {}  # how each choice of a stream did, by its index
        self._last = b"", b""  # data of a stream's last two events

    def see(self, piece: bytes) -> None:
        if self._is_odd:
            return
        known = len(self._rest)
        self._rest += piece
        cut = self._rest.rfind(b"\n", known) + 1 if self._is_stream else 0
        lines = bytes(self._rest[:cut])
        del self._rest[:cut]
        if len(self._rest) > LARGEST_JUDGED:
            self._is_odd, self._rest = True, bytearray()
        elif lines:
            self._judge(lambda: self._read(lines))

    @property
    def is_final(self) -> bool:
        """Whether it is a whole answer, now that all has been seen."""
        if self._is_stream and not self._is_odd and self._rest:
            self._judge(lambda: self._read(bytes(self._rest)))
        return not self._is_odd and self._judge(self._has_ended if self._is_stream else self._is_final_whole)

    def _judge(self, judgement: Callable[[], bool]) -> bool:
        """What it says; an answer that it cannot be made of is an odd one."""
        try:
            is_fine = judgement()
        except (ValueError, RecursionError, AttributeError, TypeError, LookupError):
            is_fine = False
        self._is_odd |= not is_fine
        return is_fine

    def _is_final_whole(self) -> bool:
        answer = json.loads(self._rest)
        if self._path == EMBEDDINGS:
            return bool(answer.get("data"))
        if self._path == RESPONSES:
            return _is_final_response(answer)
        if self._path == MESSAGES:
            return answer.get("stop_reason") in HINTED[MESSAGES].ends
        choices = answer["choices"]
        ends = HINTED[self._path].ends
        return len(choices) == choices_of(self._asked) and all(choice["finish_reason"] in ends for choice in choices)

    def _read(self, lines: bytes) -> bool:
        """Take in whole lines of a stream; False for an error."""
        for line in lines.splitlines():
            if line.startswith((b'data: {"error"', b"event: error")):
                return False
            if line.startswith(b"data:"):
                data = line.removeprefix(b"data:").strip()
                self._last = self._last[1], data
                if _FINISH.search(data):
                    self._take(json.loads(data))
        return True

    def _take(self, event: Mapping[str, Any]) -> None:
        if self._path == MESSAGES:
            if event.get("type") == "message_delta":
                self._ended[len(self._ended)] = event["delta"]["stop_reason"]
        elif self._path != RESPONSES:
            for choice in event["choices"]:
                if choice.get("finish_reason") is not None:
                    self._ended[choice["index"]] = choice["finish_reason"]

    def _has_ended(self) -> bool:
        before, last = self._last
        if self._path == RESPONSES:
            return _is_final_response(json.loads(before if last == _DONE else last)["response"])
        if self._path == MESSAGES:
            is_over, wanted = json.loads(last)["type"] == "message_stop", 1
        else:
            is_over, wanted = last == _DONE, choices_of(self._asked)
        return is_over and len(self._ended) == wanted and HINTED[self._path].ends.issuperset(self._ended.values())


def _is_final_response(response: Mapping[str, Any]) -> bool:
    if response.get("status") == "incomplete":
        return (response.get("incomplete_details") or {}).get("reason") == "max_output_tokens"
    return response.get("status") == "completed"
