"""A line of a worker's feed, as its plugin writes it (`engine_patches/reporting/events_api.py`), read within bounds.

What is larger, or of another type, comes from something else. Lengths and positions are in tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

import msgspec
from msgspec import Meta

from proxy.http.json_body import OverBound

# Of what the plugin tells at once, twice over: a line, the values and events in it, and one event, which is read in a
# step.
MOST_BYTES, MOST_VALUES, MOST_EVENTS, MOST_EVENT_BYTES = 2**21, 2**18, 2**10, 2**16

MOST_NAME = 1024  # characters of a request's id, and of what names a state or a reason
MOST_POSITIONS = 64  # of one request; its hint has fewer entries
MOST_COUNT = 2**53

ShortText = Annotated[str, Meta(max_length=MOST_NAME)]
Count = Annotated[int, Meta(ge=0, le=MOST_COUNT)]


class Admitted(msgspec.Struct, array_like=True, tag="admitted"):
    """A request has started."""

    request_id: ShortText
    reason: ShortText
    hit_tokens: Count
    shared: Count  # with an earlier prompt that the engine has seen
    positions: Annotated[tuple[Count, ...], Meta(max_length=MOST_POSITIONS)]  # of the hint's entries; 0: not there
    pin: ShortText = ""  # what became of the wish to pin its prompt, or to release it, if an answer says that


class Pinned(msgspec.Struct, array_like=True, tag="pinned"):
    """What became of a request's wish to pin its prompt, or to release it."""

    request_id: ShortText
    fate: ShortText


class Came(msgspec.Struct, array_like=True, tag="came"):
    """A request is computed up to token `end`."""

    request_id: ShortText
    end: Count
    states: list[tuple[Count, ShortText]]  # position, and name: "" if none is found


class Gone(msgspec.Struct, array_like=True, tag="gone"):
    """A state can no longer be found."""

    state: ShortText


class Cleared(msgspec.Struct, array_like=True, tag="cleared"):
    """No state can be found any more."""

    why: ShortText = ""  # "lost": reports were


class AdapterGone(msgspec.Struct, array_like=True, tag="adapter"):
    """The states of a LoRA adapter are gone: another one has its name."""

    name: ShortText


Event = Admitted | Pinned | Came | Gone | Cleared | AdapterGone


class FeedLine(msgspec.Struct):
    """Some of a feed. Its events are read one by one, since a line may have thousands."""

    boot: ShortText
    cursor: Count
    events: Annotated[list[msgspec.Raw], Meta(max_length=MOST_EVENTS)]
    reset: bool  # events were lost to this reader
    drafts: tuple[ShortText, ShortText] | None = None  # of hints beside them: state, and figures
    load: tuple[Count, Count] | None = None  # of other gateways: requests, and tokens of their prompts to compute


_decode_line = msgspec.json.Decoder(FeedLine).decode
_decode_event: Callable[[bytes | msgspec.Raw], Event] = msgspec.json.Decoder(Event).decode


def read_line(raw: bytes) -> FeedLine:
    """A line. Raises `OverBound`, whatever is wrong with it."""
    try:
        if raw.count(b",") > MOST_VALUES:
            raise ValueError(f"more than {MOST_VALUES:,} values")
        return _decode_line(raw)
    except (ValueError, RecursionError) as error:
        raise OverBound(str(error)) from None


def read_event(raw: bytes | msgspec.Raw) -> Event:
    """An event of a line. Raises `ValueError` or `RecursionError`."""
    if len(raw) > MOST_EVENT_BYTES:
        raise ValueError("it is too long")
    return _decode_event(raw)
