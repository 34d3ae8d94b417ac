"""The stream of cases of a fuzzing run: what is sent, in which pieces, and what has to become of it.

Seed and number determine a case, so that one can be repeated alone.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote_to_bytes

from tests.bench import fuzz_bodies, fuzz_framing
from tests.harness.raw_http import request
from tests.harness.raw_worker import Seen

# What must become of it.
ANSWERED = "answered"  # each request gets one whole answer, and reaches the worker once or not at all

REFUSED = "refused"  # nothing of it reaches the worker

SURVIVED = "survived"  # no error of the gateway's own, no hang

# Fields the gateway may set or take out.
_ITS_OWN = ("vllm_xargs", "stream_options", "cache_salt", "kv_transfer_params")

_HINT = re.compile(rb',?"vllm_xargs":\{"seamark_boundaries":\[(?:-?[0-9]+,?|"[a-z0-9:,-]+",?)*\]\}')


@dataclass(frozen=True)
class Sent:
    """One well-framed request."""

    name: str  # its x-mock-id
    method: str
    target: str
    body: bytes


@dataclass(frozen=True)
class Case:
    """Bytes, and what they are."""

    number: int
    kind: str
    verdict: str
    pieces: Sequence[bytes]  # written one after the other
    requests: Sequence[Sent] = ()  # where they are well framed
    leaves: bool = False  # the client closes without waiting

    @property
    def data(self) -> bytes:
        return b"".join(self.pieces)


def case(seed: int, number: int) -> Case:
    """The case with this number."""
    rng = random.Random(f"{seed}/{number}")
    name = name_of(seed, number)
    kind = rng.random()
    if kind < 0.5:
        return _well_framed(rng, number, [_request(rng, name)])
    if kind < 0.6:
        return _well_framed(rng, number, [_request(rng, f"{name}-{each}") for each in range(rng.randrange(2, 6))])
    if kind < 0.7:
        wrong, data = rng.choice(list(fuzz_framing.ambiguous(name).items()))
        return Case(number, wrong, REFUSED, cut(rng, data))
    if kind < 0.8:
        return Case(number, "odd", SURVIVED, cut(rng, fuzz_framing.odd(rng, name)))
    bases = (_request(rng, name)[1], fuzz_framing.odd(rng, name), *fuzz_framing.ambiguous(name).values())
    base = rng.choice(bases[:1] * 20 + bases)
    if kind < 0.93:
        return Case(number, "mutated", SURVIVED, cut(rng, fuzz_framing.mutated(rng, base)))
    if kind < 0.94:
        return _limited(rng, number, name)
    return Case(number, "half", SURVIVED, cut(rng, base[: rng.randrange(1, len(base) + 1)]), leaves=True)


def name_of(seed: int, number: int) -> str:
    """What the requests of a case are called, or begin with."""
    return f"fuzz-{seed}-{number}"


def cut(rng: random.Random, data: bytes) -> Sequence[bytes]:
    """The bytes as one, or in pieces that may end anywhere."""
    if rng.random() < 0.6 or len(data) < 2:
        return [data]
    at = sorted(rng.randrange(1, len(data)) for _ in range(rng.choice((1, 2, 8))))
    return [data[start:end] for start, end in zip([0, *at], [*at, len(data)], strict=True)]


def _well_framed(rng: random.Random, number: int, made: Sequence[tuple[Sent, bytes]]) -> Case:
    kind = "well framed" if len(made) == 1 else "pipelined"
    data = b"".join(data for _, data in made)
    return Case(number, kind, ANSWERED, cut(rng, data), [sent for sent, _ in made])


def _limited(rng: random.Random, number: int, name: str) -> Case:
    """What the settings just allow, or just not."""
    is_beyond = rng.random() < 0.5
    body, fields = fuzz_bodies.at_a_limit(rng, is_beyond), {"content-type": "application/json", "x-mock-id": name}
    data = request("POST", "/v1/chat/completions", fields, body)
    if is_beyond:
        return Case(number, "beyond a limit", REFUSED, cut(rng, data))
    return Case(number, "at a limit", ANSWERED, cut(rng, data), [Sent(name, "POST", "/v1/chat/completions", body)])


def _request(rng: random.Random, name: str) -> tuple[Sent, bytes]:
    method, target = rng.choice(fuzz_bodies.METHODS), rng.choice(fuzz_bodies.PATHS)
    body = fuzz_bodies.raw(rng) if method in ("POST", "PUT", "PATCH") or rng.random() < 0.1 else b""
    headers = {"content-type": "application/json", "x-mock-id": name}
    headers |= dict(rng.choice(fuzz_bodies.HEADERS) for _ in range(rng.choice((0, 0, 1, 2, 4))))
    if "connection" in headers:
        headers["x-fuzz"] = "hop"
    elif rng.random() < 0.2:  # an offer that the gateway leaves alone; the body is the request's all the same
        headers |= {"connection": "keep-alive, upgrade", "upgrade": rng.choice(("h2c", "websocket"))}
    return Sent(name, method, target, body), request(method, target, headers, body)


def complaint(sent: Sent, seen: Seen) -> str:
    """How what arrived differs from what was sent; empty where it does not."""
    if seen.method.decode() != sent.method:
        return f"{sent.method} arrived as {seen.method!r}"
    if unquote_to_bytes(sent.target) != unquote_to_bytes(seen.target):
        return f"target {sent.target[:200]!r} arrived as {seen.target[:200]!r}"
    return "" if same_body(sent.body, seen.body) else f"the body arrived as {seen.body[:500]!r}"


def same_body(sent: bytes, seen: bytes) -> bool:
    """Whether a body is the same but for its encoding and for what the gateway may put into it."""
    sent, seen = _utf8(sent), _utf8(seen)
    if sent == seen or sent == _HINT.sub(b"", seen):
        return True
    try:
        return _without_own(sent) == _without_own(seen)
    except (ValueError, RecursionError):
        return False


def _utf8(raw: bytes) -> bytes:
    try:
        return raw.decode(json.detect_encoding(raw), "surrogatepass").encode("utf-8", "surrogatepass")
    except UnicodeError:
        return raw


def _without_own(raw: bytes) -> Any:
    parsed = json.loads(raw, parse_constant=str, parse_int=str)
    if isinstance(parsed, dict):
        return {name: value for name, value in parsed.items() if name not in _ITS_OWN}
    return parsed
