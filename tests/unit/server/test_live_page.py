"""The live page's headers let a browser run its own script and style, and nothing else."""

from __future__ import annotations

import base64
import hashlib

import pytest

from proxy.server.live_page import HEADERS, HTML


@pytest.mark.parametrize("tag", [b"script", b"style"])
def test_the_policy_names_the_content_of_the_only_element(tag):
    content = HTML.split(b"<%b>" % tag)[1].split(b"</%b>" % tag)[0]
    digest = base64.b64encode(hashlib.sha256(content).digest()).decode()
    directives = dict(part.strip().split(" ", 1) for part in HEADERS["content-security-policy"].split(";"))
    assert directives[f"{tag.decode()}-src"] == f"'sha256-{digest}'"
    assert directives["default-src"] == "'none'"
