"""Where a worker says that its reports are read, and what of that is believed."""

from __future__ import annotations

import json

import pytest

from proxy.fleet.reports import Told, base_url, read_sources

OURS = {"enable_kv_cache_events": False, "publisher": "null", "endpoint": "tcp://127.0.0.1:33007", "topic": "seamark"}

THEIRS = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": "tcp://*:5557", "topic": "kv-events"}


@pytest.mark.parametrize(
    ("sources", "told"),
    [
        ({"0": OURS, "1": OURS}, Told("127.0.0.1:33007", ranks=(0, 1))),
        ({"0": THEIRS}, Told(beside="*:5556")),
        ({"1": THEIRS | {"endpoint": "tcp://*:5558"}, "0": THEIRS}, Told(beside="*:5556", ranks=(0, 1))),
        ({"0": THEIRS | {"endpoint": "inproc://x"}}, Told()),
        ([], Told()),
        ({"0": "text"}, Told()),
    ],
)
def test_vllms_list_of_publishers_tells(sources, told):
    assert read_sources(json.dumps(sources).encode()) == told


@pytest.mark.parametrize("answer", [b"{", b"\xff", b"[" * 100_000])
def test_what_is_no_list_tells_nothing(answer):
    assert read_sources(answer) == Told()


@pytest.mark.parametrize(
    ("worker", "at", "url"),
    [
        ("http://127.0.0.1:8000", "127.0.0.1:33007", "http://127.0.0.1:33007"),
        ("http://localhost:8000", "127.0.0.1:33007", "http://localhost:33007"),
        ("http://spark:8000", "192.0.2.7:8001", "http://spark:8001"),  # of what it tells, the port alone
        ("http://[::1]:8000", "[::1]:33007", "http://[::1]:33007"),
        ("https://spark/prefix", "evil.example:8001", "http://spark:8001"),
    ],
)
def test_the_gateway_asks_no_host_but_the_workers(worker, at, url):
    assert base_url(worker, at) == url


@pytest.mark.parametrize(
    ("worker", "at", "why"),
    [
        ("http://spark:8000", "127.0.0.1:33007", "SEAMARK_REPORTS_AT"),
        ("http://127.0.0.1:8000", "127.0.0.1:70000", "names no port"),
        ("http://127.0.0.1:8000", "127.0.0.1:" + "1" * 5000, "names no port"),
    ],
)
def test_where_they_cannot_be_read_the_reason_is_said(worker, at, why):
    with pytest.raises(ValueError, match=why):
        base_url(worker, at)
