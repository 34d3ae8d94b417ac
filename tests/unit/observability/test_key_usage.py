"""Totals by API key."""

from __future__ import annotations

from proxy.chat.usage import Usage
from proxy.metrics import Metrics
from proxy.observability.key_usage import KeyUsage


def test_each_key_has_totals_of_its_own_in_metrics_and_as_json():
    metrics = Metrics()
    usage = KeyUsage(metrics)
    usage.request("bob")  # whose client left before the engine said anything
    for prompt, cached, output in ((100, 80, 7), (50, None, 0)):
        usage.request("ann")
        usage.tokens("ann", Usage(prompt, cached, output))
    assert usage.as_json() == [
        {"name": "ann", "requests": 2, "prompt_tokens": 150, "cached_tokens": 80, "output_tokens": 7},
        {"name": "bob", "requests": 1, "prompt_tokens": 0, "cached_tokens": 0, "output_tokens": 0},
    ]

    def counted(key: str) -> list[float | None]:
        value = metrics.registry.get_sample_value
        kinds = ("prompt", "cached", "output")
        tokens = [value("seamark_key_tokens_total", {"key": key, "kind": kind}) for kind in kinds]
        return [value("seamark_key_requests_total", {"key": key}), *tokens]

    assert counted("ann") == [2, 150, 80, 7]
    assert counted("bob") == [1, None, None, None]
