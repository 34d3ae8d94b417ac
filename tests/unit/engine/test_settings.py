"""The plugin's settings: a wrong value stops no engine, the default is used and one line says so."""

from __future__ import annotations

import logging
import os

import pytest

from engine_patches import ledger, plugin, settings


@pytest.fixture
def lines(engine_log: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    """What is logged, information included."""
    engine_log.set_level(logging.INFO, settings.logger.name)
    return engine_log


@pytest.mark.parametrize("value", ["half", "0", "-0.5", "1.01", "nan"])
def test_what_is_no_part_of_the_cache_is_the_default_with_one_line(monkeypatch, lines, value):
    monkeypatch.setenv(settings.STATE_SHARE, value)
    assert settings.state_share() == settings.DEFAULT_SHARE
    (line,) = lines.messages
    assert settings.STATE_SHARE in line and repr(value) in line


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


@pytest.mark.parametrize(("value", "share", "logged"), [("0.0", 0.0, 0), ("0.999", 0.999, 0), ("-0.001", 0.1, 1)])
def test_pins_may_not_hold_all_of_the_cache(monkeypatch, lines, value, share, logged):
    monkeypatch.setenv(settings.PIN_SHARE, value)
    assert settings.pin_share() == share and len(lines.messages) == logged


@pytest.mark.parametrize(
    ("value", "address", "logged"),
    [
        (None, ("127.0.0.1", 0), 0),
        ("host:0", ("host", 0), 0),
        ("host:65535", ("host", 65535), 0),
        ("host:65536", ("127.0.0.1", 0), 1),
        ("host:\u0661", ("127.0.0.1", 0), 1),
        ("8001", ("127.0.0.1", 0), 1),
        ("host:", ("127.0.0.1", 0), 1),
        (" [::1]:8001 ", ("::1", 8001), 0),
    ],
)
def test_reports_are_read_at_a_host_and_a_port(monkeypatch, lines, value, address, logged):
    monkeypatch.delenv(settings.REPORTS_AT, raising=False)
    if value is not None:
        monkeypatch.setenv(settings.REPORTS_AT, value)
    assert settings.reports_at() == address and len(lines.messages) == logged


@pytest.mark.parametrize(
    ("value", "mode", "logged"),
    [(None, "auto", 0), ("", "auto", 0), (" AUTO ", "auto", 0), ("1", "1", 0), ("0", "0", 0), ("yes", "auto", 1)],
)
def test_hints_beside_drafts_are_tried_unless_it_is_said_otherwise(monkeypatch, lines, value, mode, logged):
    monkeypatch.delenv(settings.DRAFTS, raising=False)
    if value is not None:
        monkeypatch.setenv(settings.DRAFTS, value)
    assert settings.drafts() == mode and len(lines.messages) == logged


@pytest.mark.parametrize("default", [True, False])
@pytest.mark.parametrize(("value", "on"), [("", None), ("0", False), (" 1 ", True), ("no", None)])
def test_states_at_chunk_ends_are_switched_or_left_to_the_engine(monkeypatch, lines, default, value, on):
    monkeypatch.setenv(settings.CHUNK_ENDS, value)
    assert settings.chunk_ends(default) is (default if on is None else on)
    assert len(lines.messages) == (value == "no")


def test_hints_are_taken_from_networks_and_what_is_none_is_told(monkeypatch, lines):
    monkeypatch.setenv(settings.HINTS_FROM, " 10.0.0.0/8,, nonsense, ::1 ,10.0.0.1/8")
    assert list(map(str, settings.hints_from())) == ["10.0.0.0/8", "::1/128"]
    assert len(lines.messages) == 2
    monkeypatch.setenv(settings.HINTS_FROM, "*")
    assert list(map(str, settings.hints_from())) == ["0.0.0.0/0", "::/0"]


@pytest.mark.parametrize("mode", [None, " 1 ", "Reference"])
@pytest.mark.parametrize("count", [0, 3])
def test_a_mode_applies_its_patches_and_says_how_many_are_live(monkeypatch, lines, mode, count):
    asked: list[set[ledger.PatchRole]] = []
    monkeypatch.setattr(ledger, "apply", lambda patches: asked.append({each.role for each in patches}) or count)
    monkeypatch.setenv(settings.RAY_PREFIXES, "")
    monkeypatch.delenv(settings.MODE_VARIABLE, raising=False)
    if mode is not None:
        monkeypatch.setenv(settings.MODE_VARIABLE, mode)
    plugin.register()
    assert asked == [{ledger.PatchRole.CURE} if mode == "Reference" else set(ledger.PatchRole)]
    assert len(lines.messages) == (mode != "Reference" and count > 0)
    assert not lines.messages or f"{count} patches" in lines.messages[0]


@pytest.mark.parametrize(("mode", "said"), [("0", 0), (" OFF", 1), ("2", 1)])
def test_what_is_no_mode_applies_nothing(monkeypatch, lines, mode, said):
    monkeypatch.setattr(ledger, "apply", lambda _: pytest.fail("patches are applied"))
    monkeypatch.setenv(settings.RAY_PREFIXES, "")
    monkeypatch.setenv(settings.MODE_VARIABLE, mode)
    plugin.register()
    assert len(lines.messages) == said


def test_a_vllm_that_is_not_fitted_ends_nothing_and_says_which_are(monkeypatch, lines):
    def differs(_: object) -> int:
        raise ledger.ShapeMismatch("another one")

    monkeypatch.setattr(ledger, "apply", differs)
    monkeypatch.setenv(settings.RAY_PREFIXES, "")
    monkeypatch.setenv(settings.MODE_VARIABLE, "1")
    plugin.register()
    (line,) = lines.messages
    assert "another one" in line and settings.SUPPORTED in line and settings.IMAGE in line
