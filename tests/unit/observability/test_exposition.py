"""Two expositions as one that a strict reader takes."""

from __future__ import annotations

import pytest

from proxy.observability.exposition import merged


@pytest.mark.parametrize(
    ("first", "second", "both"),
    [
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
