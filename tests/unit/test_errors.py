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


def test_an_error_says_its_message_and_the_parameter_that_is_wrong():
    error = errors.BadRequest("n: it is too large", "n")
    assert str(error) == "n: it is too large" and error.as_dict() == {
        "message": "n: it is too large",
        "type": "invalid_request_error",
        "param": "n",
        "code": None,
    }
    assert errors.BadRequest("x").as_dict()["param"] is None and errors.Overloaded("x").retry_after == 2


@pytest.mark.parametrize(
    ("given", "known", "said"),
    [
        ("prot", ["port", "host"], "; did you mean port?"),
        ("port", ["port", "ports", "sport"], "; did you mean port or sport?"),
        ("zzz", ["port"], ""),
        ("port", [], ""),
    ],
)
def test_at_most_two_names_that_read_like_it_are_offered(given, known, said):
    assert errors.did_you_mean(given, known) == said
    assert errors.did_you_mean(given, iter(known), "--") == said.replace("mean ", "mean --").replace("or ", "or --")
