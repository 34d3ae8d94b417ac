"""`seamark boundary`, which asks a server by itself."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock

import pytest

from proxy.commands import boundary
from proxy.commands.boundary import main
from tests.harness.in_memory_gateway import Reachable
from tests.harness.recording_worker import RecordingWorker, respond

URL = "http://127.0.0.1:8000"

CHAT = {
    "messages": [{"role": "system", "content": "The tides of Elbe and Weser."}, {"role": "user", "content": "Now?"}]
}


@pytest.fixture
def worker(reachable: Reachable) -> RecordingWorker:
    made = RecordingWorker(url=URL, models=("m", "n"))
    reachable.add(made)
    return made


@pytest.fixture
def asked(tmp_path: Path, capsys: pytest.CaptureFixture[str], reachable: Reachable) -> Callable[..., Any]:
    """`asked(body, *flags)`: what is printed as JSON, or else the exit status and the line that says why."""

    def asked(body: Any, *flags: str) -> Any:
        file = tmp_path / "chat.json"
        file.write_text(body if isinstance(body, str) else json.dumps(body))
        status = main([str(file), *(flags or ("--worker", URL))])
        out, err = capsys.readouterr()
        assert reachable.unclosed == 0
        if status == 0:
            assert not err
            return json.loads(out)
        assert not out
        return status, err.rstrip("\n")

    return asked


def test_boundaries_are_told_by_their_tokens_the_shortest_first_and_nothing_is_computed(worker, asked):
    found = asked(CHAT, "--worker", f"{URL}/v1/")
    prompt = worker.template({**CHAT, "model": "m"})
    asks = prompt.index("Now?")
    assert [(each["kind"], each["tokens"]) for each in found["boundaries"]] == [("system", asks), ("turn", asks + 4)]
    assert found["prompt_tokens"] == len(prompt) and len(bytes.fromhex(found["key"])) > 0
    assert [each["entry"] for each in found["boundaries"]] == found["entries"] and not worker.requests
    assert asked({**CHAT, "model": "n"})["entries"] == asked(CHAT)["entries"]
    assert asked({**CHAT, "model": "o"}) == (2, "seamark boundary: model: 'o' is not served there, only m, n")


NO_MESSAGES = "messages: a list with at least one message is needed"


@pytest.mark.parametrize(
    ("body", "why"),
    [*((text, "FILE: ") for text in ("{", "[]", "[" * 1000)), ({}, NO_MESSAGES), ({"messages": "a"}, NO_MESSAGES)],
)
def test_a_chat_that_is_none_is_the_callers_fault(worker, asked, capsys, body, why):
    status, said = asked(body)
    assert status == 2 and said.startswith(f"seamark boundary: {why}") and not worker.renders
    assert main(["/nowhere", "--worker", URL]) == 2
    assert capsys.readouterr().err == "seamark boundary: FILE: [Errno 2] No such file or directory: '/nowhere'\n"


@pytest.mark.parametrize("url", ["http://127.0.0.1:9", "nonsense", URL])
def test_a_server_that_is_not_there_or_has_no_models_is_no_fault_of_the_chat(asked, reachable, url):
    reachable.add(RecordingWorker(models=()))
    assert asked(CHAT, "--worker", url) == (1, f"seamark boundary: --worker: no vLLM server answers at {url}")


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (b'{"error": {"message": "roles must alternate"}}', "roles must alternate"),
        (b'{"error": "x"}', ""),
        (b"no JSON", ""),
    ],
)
def test_a_chat_that_the_server_does_not_render_is_told_in_its_words(asked, reachable, answer, said):
    class Refuses(RecordingWorker):
        async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
            if "render" in scope["path"] or scope["path"] == "/tokenize":
                await respond(send, answer, status=400)
            else:
                await super().__call__(scope, receive, send)

    reachable.add(Refuses())
    status, why = asked(CHAT)
    begin = "seamark boundary: messages: the server does not render this chat: "
    assert status == 2 and why.startswith(begin + said) and len(why) > len(begin)


def test_a_folder_is_rendered_only_if_it_is_a_models_and_vllm_is_here(asked, tmp_path, monkeypatch):
    status, why = asked(CHAT, "--model", str(tmp_path))
    assert (status, why) == (2, f"seamark boundary: --model: {tmp_path} is not a model folder (no config.json)")
    (tmp_path / "config.json").write_text("{}")
    monkeypatch.setattr(boundary.importlib.util, "find_spec", lambda name: None)
    status, why = asked(CHAT, "--model", str(tmp_path))
    assert status == 1 and "there is none in this environment; or ask a --worker URL" in why


class Server:
    """vLLM's render server as a process: it answers once it was looked at so often, or ends, with `after` None."""

    def __init__(self, reachable: Reachable, after: int | None) -> None:
        self.reachable, self.after, self.looks = reachable, after, 0
        self.calls: list[str] = []
        self.terminate, self.wait = (partial(self.calls.append, name) for name in ("terminate", "wait"))

    def __call__(self, command: list[str], *, stdin: Any, stdout: Any, stderr: Any, env: dict[str, str]) -> Server:
        self.command, self.environment = command, env
        stdout.write(b"first line\nno such model\n")
        return self

    def poll(self) -> int | None:
        self.looks += 1
        if self.looks == self.after:
            port = self.command[self.command.index("--port") + 1]
            self.reachable.add(RecordingWorker(models=("served",)), f"http://127.0.0.1:{port}")
        return 1 if self.after is None and self.looks == 2 else None


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model's."""
    (tmp_path / "config.json").write_text("{}")
    monkeypatch.setattr(boundary.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(boundary.asyncio, "sleep", AsyncMock())
    monkeypatch.setattr(boundary, "free_port", lambda: 15001)
    return tmp_path


@pytest.mark.parametrize(("model", "served"), [("served", ["--served-model-name", "served"]), (None, []), (5, [])])
def test_a_model_folder_is_rendered_by_a_server_that_ends_with_the_command(
    folder, reachable, asked, monkeypatch, model, served
):
    server = Server(reachable, after=2)
    monkeypatch.setattr(boundary.subprocess, "Popen", server)
    body = CHAT if model is None else {**CHAT, "model": model}
    found = asked(body, "--model", str(folder))
    if model == 5:
        assert found[0] == 2 and "is not served there" in found[1]
    else:
        assert found["prompt_tokens"]
    assert server.calls == ["terminate", "wait"] and server.looks == 2
    assert reachable.patience["/v1/models"] == 60.0
    assert server.command[1:6] == ["-m", "proxy.commands.render_server", "--model", str(folder), "--host"]
    assert server.command[6] == "127.0.0.1" and {"--enable-scale-out", "--enable-auto-tool-choice"} <= {*server.command}
    assert server.command[server.command.index("hermes") + 1 :] == served
    assert (server.environment["SEAMARK_ENGINE"], server.environment["HF_HUB_OFFLINE"]) == ("0", "1")


@pytest.mark.parametrize(("after", "seconds"), [(None, 0.0), (0, 120.1)], ids=["it ends", "it takes too long"])
def test_a_render_server_that_does_not_come_up_is_ended_and_told_by_its_last_line(
    folder, reachable, asked, monkeypatch, after, seconds
):
    server = Server(reachable, after)
    monkeypatch.setattr(boundary.subprocess, "Popen", server)
    clock = iter([0.0, seconds - 0.1, *[seconds] * 9])
    monkeypatch.setattr(boundary, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    status, why = asked(CHAT, "--model", str(folder))
    assert status == 1 and why.endswith("--model: vLLM's render server did not start: no such model")
    assert server.calls == ["terminate", "wait"] and server.looks == 2
