"""Which workers start a trial of their drafts, and with which words."""

from __future__ import annotations

import os
import sys
from typing import Any

import pytest

from engine_patches.commands import draft_trial

DRAFTING = ["--speculative-config", '{"method":"mtp"}']


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Children that would have been started."""
    for name in ("SEAMARK_DRAFTS", "SEAMARK_ENGINE"):
        monkeypatch.delenv(name, raising=False)
    found: list[Any] = []
    monkeypatch.setattr(draft_trial, "_started", [])
    monkeypatch.setattr(draft_trial.subprocess, "Popen", lambda words, **given: found.append((words, given)) or 7)
    return found


@pytest.mark.parametrize(
    ("given", "config", "variable", "address"),
    [
        (DRAFTING, {}, "", "http://127.0.0.1:8001"),
        *(([*DRAFTING, flag, "x"], {}, "", None) for flag in ("--headless", "--uds", "--ssl-keyfile")),
        (["-sc", "{}", "--host=[::1]"], {}, "", "http://[::1]:8001"),
        ([], {"speculative_config": {"method": "mtp"}, "host": "10.0.0.7"}, "", "http://10.0.0.7:8001"),
        ([], {}, "", None),
        (DRAFTING, {}, "SEAMARK_DRAFTS=0", None),  # it is decided
        (DRAFTING, {}, "SEAMARK_ENGINE=0", None),
    ],
)
def test_the_worker_itself_is_asked_where_it_drafts_and_nothing_is_decided(
    started, given, config, variable, address, monkeypatch
):
    if variable:
        monkeypatch.setenv(*variable.split("="))
    draft_trial.start(given, config, "8001")
    assert [words[4] for words, _ in started] == ([address] if address else [])
    for words, _ in started:
        assert words[:3] == [sys.executable, "-m", "proxy.commands.draft_trial"]
        assert words[-2:] == ["--parent", str(os.getpid())]


@pytest.mark.parametrize(
    ("key", "config"), [(["--api-key", "secret"], {}), ([], {"api_key": "secret"}), ([], {})], ids=str
)
def test_the_key_goes_by_the_environment_and_the_child_has_no_pipe_to_anybody(started, monkeypatch, key, config):
    monkeypatch.setenv("VLLM_API_KEY", "theirs")
    draft_trial.start([*DRAFTING, *key], config, "8001")
    ((words, given),) = started
    assert given.pop("env") == {**os.environ, "VLLM_API_KEY": "secret" if key or config else "theirs"}
    assert "secret" not in words and os.environ["VLLM_API_KEY"] == "theirs"
    assert given == dict.fromkeys(("stdin", "stdout"), draft_trial.subprocess.DEVNULL) and draft_trial._started == [7]


def test_a_child_that_cannot_start_costs_the_worker_nothing(started, monkeypatch, capsys):
    def popen(words: Any, **_: Any) -> None:
        raise OSError("no more processes")

    monkeypatch.setattr(draft_trial.subprocess, "Popen", popen)
    draft_trial.start(DRAFTING, {}, "8000")
    assert "stay on trial until a gateway tries them" in capsys.readouterr().err
