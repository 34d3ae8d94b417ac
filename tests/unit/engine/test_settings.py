"""The plugin's settings: a wrong value stops no engine, the default is used and one line says so."""

from __future__ import annotations

import logging
import os

import pytest

from engine_patches import plugin, settings


@pytest.fixture
def lines(engine_log: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    """What is logged, information included."""
    engine_log.set_level(logging.INFO, settings.logger.name)
    return engine_log


@pytest.mark.parametrize(("value", "share"), [("", settings.DEFAULT_SHARE), (" 0.25 ", 0.25), ("1", 1.0)])
def test_a_part_of_the_cache_is_taken_as_it_is(monkeypatch, lines, value, share):
    monkeypatch.setenv(settings.STATE_SHARE, value)
    assert settings.state_share() == share and not lines.messages


@pytest.mark.parametrize("value", ["half", "0", "-0.5", "1.01", "nan"])
def test_what_is_no_part_of_the_cache_is_the_default_with_one_line(monkeypatch, lines, value):
    monkeypatch.setenv(settings.STATE_SHARE, value)
    assert settings.state_share() == settings.DEFAULT_SHARE
    (line,) = lines.messages
    assert settings.STATE_SHARE in line and repr(value) in line


@pytest.mark.parametrize(("value", "share"), [("", settings.DEFAULT_PIN_SHARE), ("0", 0.0), ("0.3", 0.3)])
def test_pinned_prompts_may_hold_a_part_of_the_cache_or_nothing(monkeypatch, lines, value, share):
    monkeypatch.setenv(settings.PIN_SHARE, value)
    assert settings.pin_share() == share and not lines.messages
    monkeypatch.setenv(settings.PIN_SHARE, "1")
    assert settings.pin_share() == settings.DEFAULT_PIN_SHARE and settings.PIN_SHARE in lines.messages[0]


@pytest.mark.parametrize(("value", "on", "logged"), [("1", True, 0), ("0", False, 0), ("", True, 0), ("yes", True, 1)])
def test_a_switch_is_on_off_or_as_by_default(monkeypatch, lines, value, on, logged):
    monkeypatch.setenv(settings.FAN_OUT, value)
    assert settings.fan_out() is on and len(lines.messages) == logged


@pytest.mark.parametrize(
    ("value", "events", "logged"), [("", "units", 0), ("Blocks", "blocks", 0), ("0", "0", 0), ("all", "units", 1)]
)
def test_kv_events_name_units_blocks_or_what_vllm_does(monkeypatch, lines, value, events, logged):
    monkeypatch.setenv(settings.KV_EVENTS, value)
    assert settings.kv_events() == events and len(lines.messages) == logged


@pytest.mark.parametrize(
    ("others", "prefixes"),
    [("", "SEAMARK_"), ("MINE_, ", "MINE_,SEAMARK_"), ("MINE_, SEAMARK_", "MINE_, SEAMARK_")],
)
def test_vllm_is_told_once_to_give_rays_processes_the_settings(monkeypatch, others, prefixes):
    monkeypatch.setenv(settings.RAY_PREFIXES, others)
    settings.take_along_to_ray()
    settings.take_along_to_ray()
    assert os.environ[settings.RAY_PREFIXES] == prefixes


@pytest.mark.parametrize("mode", [settings.OFF, "no mode"])
def test_rays_processes_get_the_settings_of_an_engine_that_is_left_untouched_too(monkeypatch, engine_log, mode):
    monkeypatch.setenv(settings.RAY_PREFIXES, "")
    monkeypatch.setenv(settings.MODE_VARIABLE, mode)
    plugin.register()
    assert os.environ[settings.RAY_PREFIXES] == settings.PREFIX
