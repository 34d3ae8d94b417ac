"""What vLLM gives the processes that Ray starts for it, engines and workers, by its own function; Ray is not needed."""

from __future__ import annotations

import pytest
from vllm.ray.ray_env import get_env_vars_to_copy

from engine_patches import settings


@pytest.fixture(autouse=True)
def no_prefixes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(settings.RAY_PREFIXES, "")


@pytest.mark.parametrize("name", [settings.MODE_VARIABLE, settings.CHUNK_ENDS, "SEAMARK_INTERNAL_REPORTS"])
def test_vllm_copies_the_settings_where_it_copies_variables_by_their_prefixes(monkeypatch, name):
    monkeypatch.setenv(name, "0")
    assert name not in get_env_vars_to_copy()
    settings.take_along_to_ray()
    assert name in get_env_vars_to_copy()
