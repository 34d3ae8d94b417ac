"""What the engine core reports arrives as it left."""

from __future__ import annotations

import pytest

from engine_patches.reporting.stats_channel import decode_request, encode_request
from engine_patches.scheduler.counters import AdmittedRequest


@pytest.mark.parametrize("resolved", [(), (0,), (163, 0, 24_001)])
@pytest.mark.parametrize("name", ["chatcmpl-a-00000000", "a/b:c,d/", "/", "ü\u2028 x"])
def test_requests_survive_the_way_through_the_statistics(name, resolved):
    request = AdmittedRequest(name, "cold", 160, 176, resolved)
    assert decode_request(encode_request(request), 160) == request
