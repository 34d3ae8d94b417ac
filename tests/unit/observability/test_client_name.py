"""A client's name is short, and nothing but a name and a version."""

from __future__ import annotations

import pytest

from proxy.observability.client_name import MAX_CHARACTERS, client_name


@pytest.mark.parametrize(
    ("agent", "name"),
    [
        ("claude-cli/2.0.1 (external, cli)", "claude-cli/2.0.1"),
        (
            "Mozilla/5.0 (X11; Linux x86_64) AppleWebKit/537.36 (KHTML, like Gecko) Chrome/120.0 Safari/537",
            "Chrome/120",
        ),
        ("<script>", None),
        (None, None),
        ("a" * 500, "a" * MAX_CHARACTERS),
    ],
)
def test_the_first_product_names_a_client(agent, name):
    assert client_name(agent) == name
