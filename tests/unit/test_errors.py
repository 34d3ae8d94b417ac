"""The tree of errors is the one that its module draws."""

from __future__ import annotations

import re
from collections.abc import Iterator

from proxy import errors
from proxy.errors import GatewayError


def below(base: type[GatewayError]) -> Iterator[type[GatewayError]]:
    for each in base.__subclasses__():
        yield each
        yield from below(each)


def test_the_modules_docstring_names_each_error_with_its_status():
    drawn: dict[str, int] = {}
    status = 0
    for name, number in re.findall(r"\b([A-Z]\w*[a-z]\w*)(?: (\d{3}))?", errors.__doc__.split("\n\n", 1)[1]):
        status = int(number or status)  # that of the one before it, where none stands beside the name
        drawn[name] = status
    assert drawn == {each.__name__: each.status for each in (GatewayError, *below(GatewayError))}
