"""`seamark boundary`, which asks a server by itself."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

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
