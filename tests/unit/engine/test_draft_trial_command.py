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


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (DRAFTING, "http://127.0.0.1:8001"),
        ([*DRAFTING, "--host", "0.0.0.0"], "http://127.0.0.1:8001"),  # noqa: S104
        ([*DRAFTING, "--host=::"], "http://127.0.0.1:8001"),
        ([*DRAFTING, "--host", "10.0.0.7"], "http://10.0.0.7:8001"),
        ([*DRAFTING, "--host", "fd00::7"], "http://[fd00::7]:8001"),
        (["--speculative_config.method", "mtp"], "http://127.0.0.1:8001"),
        (["-sc", "{}"], "http://127.0.0.1:8001"),
        ([], None),
        ([*DRAFTING, "--headless"], None),
        ([*DRAFTING, "--uds", "/tmp/x"], None),
        ([*DRAFTING, "--ssl-keyfile", "k"], None),
    ],
)
def test_the_worker_itself_is_asked_where_it_drafts_and_can_be_asked(given, expected):
    assert address(given) == expected


def test_what_a_config_file_says_counts_too():
    assert address([], {"speculative_config": {"method": "mtp"}, "host": "10.0.0.7"}) == "http://10.0.0.7:8001"


@pytest.mark.parametrize(
    ("name", "value", "tried"),
    [
        ("SEAMARK_DRAFTS", "auto", True),
        ("SEAMARK_DRAFTS", "", True),
        ("SEAMARK_DRAFTS", "1", False),
        ("SEAMARK_DRAFTS", "0", False),
        ("SEAMARK_ENGINE", "0", False),
        ("SEAMARK_ENGINE", "reference", False),
        ("SEAMARK_ENGINE", "1", True),
    ],
)
def test_nothing_is_tried_that_a_variable_has_decided(monkeypatch, name, value, tried):
    monkeypatch.setenv(name, value)
    assert (address(DRAFTING) is not None) is tried


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


@pytest.mark.parametrize(
    ("given", "config", "flags"),
    [
        (["--a_b=1=2", "x", "--c"], {}, {"a-b": "1=2", "c": ""}),
        (["-sc.method", "mtp"], {}, {"sc": "mtp"}),
        (["--a", "1"], {"a": 2, "b_c": 3}, {"a": "1", "b-c": "3"}),
        ([], {}, {}),
    ],
)
def test_flags_are_known_by_their_names_wherever_they_stand(given, config, flags):
    assert draft_trial.flags_of(given, config) == flags


@pytest.mark.parametrize("flag", draft_trial.DRAFT_FLAGS)
def test_each_flag_that_has_vllm_draft_is_known(flag):
    assert draft_trial.drafts([f"--{flag}", "x"]) and draft_trial.drafts([], {flag.replace("-", "_"): "x"})
    assert not draft_trial.drafts([flag, f"--{flag}s", "x"])


@pytest.mark.parametrize("missing", ["proxy", "aiohttp"])
def test_where_only_the_plugin_is_installed_nothing_is_tried(monkeypatch, missing):
    monkeypatch.setattr(draft_trial.importlib.util, "find_spec", lambda name: None if name == missing else object())
    assert address(DRAFTING) is None


@pytest.mark.parametrize("host", ["", "::", "[::]", "[fd00::7]"])
def test_an_address_in_brackets_is_one_without(host):
    expected = "http://[fd00::7]:8001" if "fd00" in host else "http://127.0.0.1:8001"
    assert address([*DRAFTING, f"--host={host}"]) == expected


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
