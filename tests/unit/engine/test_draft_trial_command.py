"""Which workers start a trial of their drafts, and with which words."""

from __future__ import annotations

import os
import sys

import pytest

from engine_patches.commands import draft_trial

DRAFTING = ["--speculative-config", '{"method":"mtp"}']


@pytest.fixture(autouse=True)
def as_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SEAMARK_DRAFTS", "SEAMARK_ENGINE"):
        monkeypatch.delenv(name, raising=False)


def address(given, config=None) -> str | None:
    words = draft_trial.command(given, config or {}, "8001")
    if words is None:
        return None
    assert words[:3] == [sys.executable, "-m", "proxy.commands.draft_trial"]
    assert words[-2:] == ["--parent", str(os.getpid())]
    return words[4]


def test_what_a_config_file_says_counts_too():
    assert address([], {"speculative_config": {"method": "mtp"}, "host": "10.0.0.7"}) == "http://10.0.0.7:8001"


def test_the_key_goes_by_the_environment_and_a_child_that_cannot_start_costs_the_worker_nothing(monkeypatch, capsys):
    started = []

    def popen(words, env, **_):
        started.append((words, env))
        raise OSError("no more processes")

    monkeypatch.setattr(draft_trial.subprocess, "Popen", popen)
    draft_trial.start([*DRAFTING, "--api-key", "secret"], {}, "8000")
    words, environment = started[0]
    assert "secret" not in words and environment["VLLM_API_KEY"] == "secret"
    assert "stay on trial until a gateway tries them" in capsys.readouterr().err
    draft_trial.start([], {}, "8000")
    assert len(started) == 1


@pytest.mark.parametrize("missing", ["proxy", "aiohttp"])
def test_where_only_the_plugin_is_installed_nothing_is_tried(monkeypatch, missing):
    monkeypatch.setattr(draft_trial.importlib.util, "find_spec", lambda name: None if name == missing else object())
    assert address(DRAFTING) is None


@pytest.mark.parametrize(("key", "config"), [(["--api-key", "k"], {}), ([], {"api_key": "k"}), ([], {})])
def test_the_child_is_kept_and_has_no_pipe_to_anybody(monkeypatch, key, config):
    monkeypatch.setenv("VLLM_API_KEY", "theirs")
    started, kept = [], []
    monkeypatch.setattr(draft_trial, "_started", kept)
    monkeypatch.setattr(draft_trial.subprocess, "Popen", lambda words, **given: started.append((words, given)) or 7)
    draft_trial.start([*DRAFTING, *key], config, "8001")
    ((words, given),) = started
    assert words == draft_trial.command([*DRAFTING, *key], config, "8001") and kept == [7]
    assert given["stdin"] == given["stdout"] == draft_trial.subprocess.DEVNULL and given.keys() == {
        "env",
        "stdin",
        "stdout",
    }
    assert given["env"] == {**os.environ, "VLLM_API_KEY": "k" if key or config else "theirs"}
    assert os.environ["VLLM_API_KEY"] == "theirs"
