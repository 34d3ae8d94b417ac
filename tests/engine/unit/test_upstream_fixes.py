"""When a cure of vLLM's own defects takes hold, and what it leaves alone."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from engine_patches import upstream_fixes
from engine_patches.upstream_fixes import keep_enlarged_block_size, resets_block_size

PLATFORM_DEFAULT = 128


@pytest.mark.parametrize(
    ("before", "mode", "after"),
    [
        (384, "align", 384),
        (None, "align", PLATFORM_DEFAULT),  # nobody has chosen one yet
        (64, "align", PLATFORM_DEFAULT),
        (384, "none", PLATFORM_DEFAULT),
    ],
)
def test_an_enlarged_block_size_outlives_the_platforms_default(before, mode, after):
    config = SimpleNamespace(cache_config=SimpleNamespace(block_size=before, mamba_cache_mode=mode))

    def reset(cls, vllm_config):
        vllm_config.cache_config.block_size = PLATFORM_DEFAULT

    keep_enlarged_block_size(reset)(None, config)
    assert config.cache_config.block_size == after


def test_away_from_a_cpu_no_block_size_is_reset(monkeypatch):
    monkeypatch.setattr(upstream_fixes, "runs_on_cpu", lambda: False)
    assert resets_block_size() is False
