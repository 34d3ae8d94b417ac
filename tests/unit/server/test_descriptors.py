"""How many connections fit into the descriptors."""

from __future__ import annotations

import resource

import pytest

from proxy.server import descriptors
from proxy.server.descriptors import most_connections, raise_limit


@pytest.mark.parametrize(
    ("limit", "wanted", "most"),
    [
        (256, 0, 96),
        (258, 0, 97),
        (256, 1, 1),
        (256, 1000, 96),
        (10, 0, 1),
        (resource.RLIM_INFINITY, 10, 10),
    ],
)
def test_as_many_clients_as_have_two_descriptors_each(monkeypatch, limit, wanted, most):
    monkeypatch.setattr(descriptors.resource, "getrlimit", lambda which: (limit, limit))
    assert most_connections(wanted) == most


def test_the_soft_limit_is_raised_to_the_hard_one_where_that_is_allowed(monkeypatch):
    limits = [(256, 4096)]
    monkeypatch.setattr(descriptors.resource, "getrlimit", lambda which: limits[-1])
    monkeypatch.setattr(descriptors.resource, "setrlimit", lambda which, wanted: limits.append(wanted))
    raise_limit()
    assert limits[-1] == (4096, 4096)

    def forbidden(which: int, wanted: tuple[int, int]) -> None:
        raise OSError

    limits.append((256, 4096))
    monkeypatch.setattr(descriptors.resource, "setrlimit", forbidden)
    raise_limit()
