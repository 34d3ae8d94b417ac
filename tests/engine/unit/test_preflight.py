"""The check on a toy cache passes on the installed vLLM, and notices a cache that behaves in another way."""

import pytest
from vllm.v1.core.block_pool import BlockPool

from engine_patches.scheduler.preflight import PreflightFailed, run


def test_it_passes_here():
    run()


@pytest.mark.parametrize(
    ("method", "changed"),
    [
        ("cache_partial_block", lambda *args, **kwargs: None),
        ("_maybe_evict_cached_block", lambda self, block: False),
        ("get_cached_block", lambda self, block_hash, groups: None),
    ],
)
def test_it_notices_another_behaviour(monkeypatch, method, changed):
    monkeypatch.setattr(BlockPool, method, changed)
    with pytest.raises(PreflightFailed):
        run()


def test_an_error_in_vllms_own_code_is_a_failed_check(monkeypatch):
    def changed(*args, **kwargs):
        raise TypeError("unexpected keyword argument")

    monkeypatch.setattr(BlockPool, "cache_partial_block", changed)
    with pytest.raises(PreflightFailed, match="TypeError: unexpected keyword argument"):
        run()
