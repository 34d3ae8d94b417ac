"""Two expositions as one that a strict reader takes."""

from __future__ import annotations

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from proxy.observability.exposition import merged


def exposition(worker: str, requests: int) -> str:
    registry = CollectorRegistry()
    Counter("seamark_seconds_saved_total", "Both have it", ["by"], registry=registry).labels(worker).inc(requests)
    Gauge("same", "A series of both", registry=registry).set(requests)
    Histogram(f"latency_{worker}", 'With "quotes" and a } in a label', ["le_of"], registry=registry).labels(
        'a} "b" 1'
    ).observe(requests)
    return generate_latest(registry).decode()


def samples(text: str) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            key = (sample.name, tuple(sorted(sample.labels.items())))
            assert key not in found, key
            found[key] = sample.value
    return found


def test_every_family_stands_once_and_no_sample_is_lost():
    one, two = exposition("worker", 1), exposition("gateway", 2)
    both = merged(one, two)
    types = [line for line in both.splitlines() if line.startswith("# TYPE")]
    assert len({line.split()[2] for line in types}) == len(types)
    assert samples(both) == {**samples(two), **samples(one)}
    names = [line.split("{")[0].split()[0] for line in both.splitlines() if not line.startswith("#")]
    runs = [name for name, before in zip(names, [None, *names], strict=False) if name != before]
    assert runs.count("seamark_seconds_saved_total") == 1  # its lines stand together


@pytest.mark.parametrize(
    ("first", "second", "both"),
    [
        ("", "# TYPE a gauge\na 1\n", "# TYPE a gauge\na 1\n"),
        ("# TYPE a gauge\na 1\n", "", "# TYPE a gauge\na 1\n"),
        ("# TYPE a gauge\na 1\n# EOF\n", "# comment\n\n# TYPE a gauge\na 2\n", "# TYPE a gauge\na 1\n"),
        (
            '# TYPE a gauge\na{b="}"} 1 1700000000\n',
            '# TYPE a gauge\na{b="}"} 2\n',
            '# TYPE a gauge\na{b="}"} 1 1700000000\n',
        ),
        ("a 1\n", "# TYPE b gauge\nb 1\n", "a 1\n# TYPE b gauge\nb 1\n"),
    ],
)
def test_what_is_little_or_odd(first, second, both):
    assert merged(first, second) == both
