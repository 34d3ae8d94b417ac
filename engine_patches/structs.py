"""msgspec's `Struct`; a stand-in where vLLM, which brings it, is missing: commands import the ledger there, too."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from msgspec import Struct, field
else:
    try:
        from msgspec import Struct, field
    except ModuleNotFoundError:

        class Struct:  # of which nothing is made
            def __init_subclass__(cls, **options: Any) -> None: ...

        def field(**options: Any) -> None: ...


__all__ = ["Struct", "field"]
