"""Values of a request's fields as vLLM takes them: pydantic reads a flag or a number out of several spellings."""

from __future__ import annotations

from typing import Any

from pydantic import TypeAdapter, ValidationError

_BOOL, _INT = TypeAdapter(bool), TypeAdapter(int)


def flag(value: Any) -> bool | None:
    """What a flag says: 1, "true", "yes" and the like are true, null is false. None for what the worker refuses."""
    if value is None or isinstance(value, bool):
        return bool(value)
    try:
        return _BOOL.validate_python(value)
    except ValidationError:
        return None


def number(value: Any) -> int | None:
    """A whole number, "2" and 2.0 among them. None for null, and for what the worker refuses."""
    if value is None or type(value) is int:
        return value
    try:
        return _INT.validate_python(value)
    except ValidationError:
        return None
