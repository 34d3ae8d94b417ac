"""The tree of errors is the one that its module draws."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

import pytest

from proxy import errors
from proxy.errors import GatewayError, NotFound


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


@pytest.mark.parametrize("error", list(below(GatewayError)), ids=lambda error: error.__name__)
def test_all_errors_are_in_one_module_and_have_openais_envelope(error):
    assert error.__module__ == "proxy.errors" and 400 <= error.status < 600
    assert set(json.loads(error("Why.").body())["error"]) == {"message", "type", "param", "code"}


def test_what_may_be_served_later_says_when_and_what_is_the_clients_fault_does_not():
    later = {error.__name__ for error in below(GatewayError) if error.retry_after is not None}
    assert later == {"KeyBusy", "Unavailable", "NoWorker", "Overloaded", "Stopping"}
    assert NotFound("x").as_dict()["type"] == "invalid_request_error"
