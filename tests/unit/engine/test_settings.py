"""The plugin's settings: a wrong value stops no engine, the default is used and one line says so."""

from __future__ import annotations

import logging
import os

import pytest

from engine_patches import ledger, plugin, settings


@pytest.fixture(autouse=True)
def lines(engine_log: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> pytest.LogCaptureFixture:
    """What is logged, information included; in a process where no mode is set."""
    engine_log.set_level(logging.INFO, settings.logger.name)
    monkeypatch.setenv(settings.RAY_PREFIXES, "")
    monkeypatch.delenv(settings.MODE_VARIABLE, raising=False)
    return engine_log


LOCAL = ("127.0.0.1", 0)


@pytest.mark.parametrize(
    ("read", "name", "values", "wrong"),
    [
        (settings.state_share, settings.STATE_SHARE, {"": 0.5, "0.25": 0.25, "1": 1.0}, ["half", "0", "1.01", "nan"]),
        (settings.pin_share, settings.PIN_SHARE, {"": 0.1, "0": 0.0, "0.999": 0.999}, ["-0.001", "1"]),
        (settings.fan_out, settings.FAN_OUT, {"": True, "1": True, "0": False}, ["yes"]),
        (lambda: settings.chunk_ends(True), settings.CHUNK_ENDS, {"": True, "0": False, " 1 ": True}, ["no"]),
        (lambda: settings.chunk_ends(False), settings.CHUNK_ENDS, {"": False, "0": False, " 1 ": True}, ["no"]),
        (settings.kv_events, settings.KV_EVENTS, {"": "units", "Blocks": "blocks", "0": "0"}, ["all"]),
        (settings.drafts, settings.DRAFTS, {"": "auto", " AUTO ": "auto", "1": "1", "0": "0"}, ["yes"]),
        (
            settings.reports_at,
            settings.REPORTS_AT,
            {"": LOCAL, "host:0": ("host", 0), " [::1]:8001 ": ("::1", 8001), "host:65535": ("host", 65535)},
            ["host:65536", "host:\u0661", "8001", "host:"],
        ),
        (settings.rust_frontend, "VLLM_USE_RUST_FRONTEND", {"": False, "0": False, " 1 ": True, "yes": False}, []),
    ],
)
def test_a_wrong_value_is_the_default_with_one_line(read, name, values, wrong, monkeypatch, lines):
    monkeypatch.delenv(name, raising=False)
    assert read() == values[""]
    for value, meant in values.items():
        monkeypatch.setenv(name, value)
        assert read() == meant and not lines.messages
    for value in wrong:
        monkeypatch.setenv(name, value)
        assert read() == values[""]
        (line,) = lines.messages
        assert name in line and repr(value) in line
        lines.clear()


def test_hints_are_taken_from_networks_and_what_is_none_is_told(monkeypatch, lines):
    monkeypatch.setenv(settings.HINTS_FROM, " 10.0.0.0/8,, nonsense, ::1 ,10.0.0.1/8")
    assert list(map(str, settings.hints_from())) == ["10.0.0.0/8", "::1/128"] and len(lines.messages) == 2
    monkeypatch.setenv(settings.HINTS_FROM, "*")
    assert list(map(str, settings.hints_from())) == ["0.0.0.0/0", "::/0"]


@pytest.mark.parametrize(
    ("others", "prefixes"), [("", "SEAMARK_"), ("MINE_, ", "MINE_,SEAMARK_"), ("MINE_, SEAMARK_", "MINE_, SEAMARK_")]
)
@pytest.mark.parametrize("mode", [settings.OFF, "no mode"])
def test_vllm_is_told_once_to_give_rays_processes_the_settings_whatever_the_mode(monkeypatch, others, prefixes, mode):
    monkeypatch.setenv(settings.RAY_PREFIXES, others)
    monkeypatch.setenv(settings.MODE_VARIABLE, mode)
    plugin.register()
    plugin.register()
    assert os.environ[settings.RAY_PREFIXES] == prefixes


ALL, CURES = set(ledger.PatchRole), {ledger.PatchRole.CURE}


@pytest.mark.parametrize(
    ("mode", "roles", "count", "said"),
    [
        ("1", ALL, 3, "3 patches"),
        ("Reference", CURES, 3, ""),
        ("0", None, 3, ""),
        (" OFF", None, 3, "SEAMARK_ENGINE"),
    ],
)
def test_a_mode_applies_its_patches_and_says_how_many_are_live(monkeypatch, lines, mode, roles, count, said):
    asked: list[set[ledger.PatchRole]] = []
    monkeypatch.setattr(ledger, "apply", lambda patches: asked.append({each.role for each in patches}) or count)
    monkeypatch.setenv(settings.MODE_VARIABLE, mode)
    plugin.register()
    assert asked == ([] if roles is None else [roles])
    assert len(lines.messages) == bool(said) and said in "".join(lines.messages)


def test_a_vllm_that_is_not_fitted_ends_nothing_and_says_which_are(monkeypatch, lines):
    def differs(_: object) -> int:
        raise ledger.ShapeMismatch("another one")

    monkeypatch.setattr(ledger, "apply", differs)
    plugin.register()
    (line,) = lines.messages
    assert "another one" in line and settings.SUPPORTED in line and settings.IMAGE in line
