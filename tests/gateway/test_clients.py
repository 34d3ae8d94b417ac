"""The clients of deploy/clients.md, the real programs: two sessions each, and what the second one hits.

Each is in an environment of its own in .cache. Nothing of them reaches the internet when they run: telemetry and
look-ups are off by the switches that their makers document, and any other address leads to a proxy that does not exist.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from proxy.bench.harness.servers import CACHE, Server, Servers, free_port
from proxy.chat.chat import CHAT, MESSAGES, RESPONSES
from tests.harness.fake_engine import template
from tests.harness.gateways import metric, start_gateway
from tests.harness.recording_worker import USAGE, Stream, recorded, recording_worker
from tests.harness.waiting import wait_for

MODEL = "harbour"

# Recorded answers stopped at three tokens; a client would ask for the rest of them.
_ENDED = (
    (b'"stop_reason":"max_tokens"', b'"stop_reason":"end_turn"'),
    (b'"incomplete_details":{"reason":"max_output_tokens"}', b'"incomplete_details":null'),
    (b'"status":"incomplete"', b'"status":"completed"'),
    (b"event: response.incomplete", b"event: response.completed"),
    (b'"type":"response.incomplete"', b'"type":"response.completed"'),
)


def flat_template(body: Mapping[str, Any]) -> str:
    """The recording worker's template, with the text parts of a message joined as vLLM joins them."""
    messages = [{**message, "content": _text(message.get("content"))} for message in body["messages"]]
    return template({**body, "messages": messages})


def _text(content: Any) -> str:
    if isinstance(content, list):
        return "\n".join(str(part.get("text", "")) if isinstance(part, dict) else str(part) for part in content)
    return content or ""


def _chat(length: int, cached: int) -> list[bytes]:
    head = {"id": f"chatcmpl-{uuid.uuid4().hex}", "object": "chat.completion.chunk", "created": 1, "model": MODEL}
    details = {**USAGE["prompt_tokens_details"], "cached_tokens": cached}
    usage = {**USAGE, "prompt_tokens": length, "prompt_tokens_details": details}
    deltas = ({"role": "assistant", "content": ""}, None), ({"content": "At noon."}, None), ({}, "stop")
    chunks: list[dict[str, Any]] = [
        {**head, "choices": [{"index": 0, "delta": delta, "finish_reason": end}], "usage": None}
        for delta, end in deltas
    ]
    chunks.append({**head, "choices": [], "usage": usage})
    return [b"data: " + json.dumps(chunk).encode() + b"\n\n" for chunk in chunks] + [b"data: [DONE]\n\n"]


def _recorded(name: str, *counted: tuple[bytes, bytes]) -> list[bytes]:
    events = recorded(name)
    for old, new in (*_ENDED, *counted):
        events = [event.replace(old, new) for event in events]
    return events


def _messages(length: int, cached: int) -> list[bytes]:
    computed, hit = b'"input_tokens":%d', b'"cache_read_input_tokens":%d'
    return _recorded("messages", (computed % 16, computed % (length - cached)), (hit % 0, hit % cached))


def _responses(length: int, cached: int) -> list[bytes]:
    """With an id of its own: one that comes twice would be one response."""
    usage = b'"input_tokens":%d,"input_tokens_details":{"cached_tokens":%d'
    new = b"resp_" + uuid.uuid4().hex[:16].encode()
    recorded = _recorded("responses", (usage % (16, 0), usage % (length, cached)))
    return [re.sub(rb"resp_\w+", new, event) for event in recorded]


CLIENT_STREAMS: dict[str, Stream] = {CHAT: _chat, MESSAGES: _messages, RESPONSES: _responses}


# What a client gets besides its own: no way out, and nothing of the user who runs the tests.
ENVIRONMENT = {
    "PATH": "/usr/local/bin:/usr/bin:/bin",
    "LANG": "C.UTF-8",
    "TERM": "xterm",
    "HTTPS_PROXY": "http://127.0.0.1:9",
    "HTTP_PROXY": "http://127.0.0.1:9",
    "NO_PROXY": "127.0.0.1,localhost",
    "DO_NOT_TRACK": "1",
}


class Session(NamedTuple):
    """How one question is asked."""

    arguments: Sequence[str]  # the first: a script of the client's environment
    environment: Mapping[str, str] = {}
    before: Sequence[str] = ()  # a command by which the client is told its settings; none if empty


@dataclass(frozen=True)
class Client:
    """A program or a library from a package index."""

    name: str
    package: str  # with its version, and extras
    session: Callable[[str, str, Path], Session]  # of a URL, a question, and a home folder
    npm: bool = False
    server: Callable[[str, int, Path], Session] | None = None  # of a gateway's URL, a port, and a home folder
    health: str = "/health"  # of the server: answers 200 once it serves

    def install(self) -> Path:
        """The folder of its scripts. Raises `AssertionError` if it cannot be installed."""
        version = hashlib.sha256(f"{self.package} {sys.version}".encode()).hexdigest()[:12]
        folder = (CACHE / f"client-{self.name}-{version}").absolute()
        done = folder / "installed"
        if not done.exists():
            folder.mkdir(parents=True, exist_ok=True)
            if self.npm:
                downloads = folder / "downloads"
                downloads.mkdir(exist_ok=True)
                where = ["--prefix", str(folder), "--cache", str(downloads)]
                # Scripts of packages write into the home folder; the user's npm settings are in there.
                own = {"HOME": str(downloads), "NPM_CONFIG_USERCONFIG": str(Path.home() / ".npmrc")}
                _run(["npm", "install", "--no-audit", "--no-fund", *where, self.package], {**os.environ, **own})
                shutil.rmtree(downloads)
            else:
                _run([sys.executable, "-m", "venv", "--clear", str(folder)])
                pip = [str(folder / "bin" / "python"), "-m", "pip", "--no-cache-dir", "--quiet"]
                _run([*pip, "install", self.package])
            done.touch()
        return folder / "node_modules" / ".bin" if self.npm else folder / "bin"

    @contextmanager
    def started(self, gateway: str, home: Path) -> Iterator[str]:
        """The URL that its sessions take: of `gateway`, or of a server of its own before that.

        `home` is what all sessions of one user share; whatever runs in it ends here. Raises `NotStarted`.
        """
        with contextlib.ExitStack() as stack:
            stack.callback(_end_all, home)
            if self.server is not None:
                port, log = free_port(), home / "server.log"
                process = self._process(self.server(gateway, port, home), home, log)
                server = Server(self.name, f"http://127.0.0.1:{port}", log, process)
                stack.callback(server.stop)
                server.wait_until_ready(self.health, 300)
                gateway = server.url
            yield gateway

    def ask(self, url: str, question: str, home: Path) -> str:
        """What one session of its own with one question prints. Raises `AssertionError` if it fails."""
        log = home / "session.log"
        session = self.session(url, question, home)
        printed = ""
        for arguments in filter(None, (session.before, session.arguments)):
            process = self._process(session._replace(arguments=arguments), home, log)
            try:
                status = process.wait(120)
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)  # what it may have left behind
                process.wait()
            printed = log.read_text(errors="replace")
            assert status == 0, printed[-4000:]
        return printed

    def _process(self, session: Session, home: Path, log: Path) -> subprocess.Popen[bytes]:
        """Started in a process group of its own, with nothing of the environment of whoever runs the tests."""
        scripts, (script, *flags) = self.install(), session.arguments
        own = {"HOME": str(home), "TMPDIR": str(home)} | ({"NODE_PATH": str(scripts.parent)} if self.npm else {})
        command = script if script == "node" else str(scripts / script)
        with log.open("wb") as output:
            return subprocess.Popen(
                [command, *flags],
                cwd=home,
                env={**ENVIRONMENT, **own, **session.environment},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )


def _run(command: Sequence[str], environment: Mapping[str, str] = os.environ) -> None:
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-4000:]


def _end_all(home: Path) -> None:
    """End the daemons that clients have left behind, in process groups of their own: those that run in `home`."""
    mark = f"HOME={home}".encode()
    for environment in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if mark in environment.read_bytes().split(b"\0"):
                os.kill(int(environment.parent.name), signal.SIGKILL)


def _claude(gateway: str, question: str, home: Path) -> Session:
    names = ("ANTHROPIC_MODEL", *(f"ANTHROPIC_DEFAULT_{size}_MODEL" for size in ("OPUS", "SONNET", "HAIKU")))
    settings = home / ".claude" / "settings.json"
    settings.parent.mkdir(exist_ok=True)
    settings.write_text('{"includeGitInstructions": false}')
    return Session(
        ["claude", "-p", question],
        {
            "ANTHROPIC_BASE_URL": gateway,
            "ANTHROPIC_AUTH_TOKEN": "none",
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
            **dict.fromkeys(names, MODEL),
        },
    )


def _codex(gateway: str, question: str, home: Path) -> Session:
    settings = home / ".codex" / "config.toml"
    settings.parent.mkdir(exist_ok=True)
    settings.write_text(
        f'model = "{MODEL}"\nmodel_provider = "seamark"\nmodel_context_window = 131072\n'
        "check_for_update_on_startup = false\n[analytics]\nenabled = false\n[feedback]\nenabled = false\n"
        f'[model_providers.seamark]\nname = "seamark"\nbase_url = "{gateway}/v1"\n'
        'env_key = "SEAMARK_KEY"\nwire_api = "responses"\n'
    )
    return Session(["codex", "exec", "--skip-git-repo-check", question], {"SEAMARK_KEY": "none"})


def _opencode(gateway: str, question: str, home: Path) -> Session:
    settings = home / ".config" / "opencode" / "opencode.json"
    settings.parent.mkdir(parents=True, exist_ok=True)
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "name": "seamark",
        "options": {"baseURL": gateway + "/v1", "apiKey": "none"},
        "models": {MODEL: {"name": MODEL, "limit": {"context": 131072, "output": 8192}}},
    }
    model = f"seamark/{MODEL}"
    off = {"autoupdate": False, "share": "disabled", "model": model, "small_model": model}
    settings.write_text(json.dumps({**off, "provider": {"seamark": provider}}))
    switches = ("AUTOUPDATE", "MODELS_FETCH", "LSP_DOWNLOAD")
    return Session(["opencode", "run", question], {f"OPENCODE_DISABLE_{name}": "1" for name in switches})


def _aider(gateway: str, question: str, home: Path) -> Session:
    flags = ["--no-check-update", "--analytics-disable", "--no-show-model-warnings", "--no-git", "--yes-always"]
    return Session(
        ["aider", "--model", f"openai/{MODEL}", *flags, "--message", question],
        {"OPENAI_API_BASE": gateway + "/v1", "OPENAI_API_KEY": "none", "LITELLM_LOCAL_MODEL_COST_MAP": "True"},
    )


def _cline(gateway: str, question: str, home: Path) -> Session:
    provider = ["-P", "openai-compatible", "-m", MODEL]
    told = ["-p", "openai-compatible", "-k", "none", "-m", MODEL, "-b", gateway + "/v1"]
    return Session(["cline", *provider, question], before=["cline", "auth", *told])


SYSTEM = "You are a harbour pilot." + "".join(f" Berth {n} is {9 * n} m long." for n in range(1, 51))

_LANGCHAIN = """
import sys
from langchain_openai import ChatOpenAI
model = ChatOpenAI(model=sys.argv[1], base_url=sys.argv[2] + "/v1", api_key="none")
print(model.invoke([("system", sys.argv[3]), ("user", sys.argv[4])]).text)
"""

_OPENAI = """
import sys
from openai import OpenAI
messages = [{"role": "system", "content": sys.argv[3]}, {"role": "user", "content": sys.argv[4]}]
client = OpenAI(base_url=sys.argv[2] + "/v1", api_key="none")
print(client.chat.completions.create(model=sys.argv[1], messages=messages).choices[0].message.content)
"""

_OPENAI_NPM = """
const { OpenAI } = require("openai");
const [model, gateway, system, question] = process.argv.slice(1);
const client = new OpenAI({ baseURL: gateway + "/v1", apiKey: "none" });
const messages = [{ role: "system", content: system }, { role: "user", content: question }];
client.chat.completions.create({ model, messages }).then((answer) => console.log(answer.choices[0].message.content));
"""


def _script(program: str, flag: str, code: str) -> Callable[[str, str, Path], Session]:
    def session(gateway: str, question: str, home: Path) -> Session:
        return Session([program, flag, code, MODEL, gateway, SYSTEM, question])

    return session


def _litellm(gateway: str, port: int, home: Path) -> Session:
    config = home / "litellm.yaml"  # JSON is YAML
    model = {"model": f"openai/{MODEL}", "api_base": gateway + "/v1", "api_key": "none"}
    settings = {"dangerously_permit_weak_or_unset_master_key": True}  # it listens on the loopback address alone
    models = [{"model_name": MODEL, "litellm_params": model}]
    config.write_text(json.dumps({"model_list": models, "general_settings": settings}))
    flags = ["--config", str(config), "--host", "127.0.0.1", "--port", str(port), "--telemetry", "False"]
    return Session(["litellm", *flags], {"LITELLM_LOCAL_MODEL_COST_MAP": "True"})


_CHAT_OF_OPEN_WEBUI = """
import sys
import httpx
_, model, server, system, question = sys.argv
user = {"name": "Pilot", "email": "pilot@example.com", "password": "harbour"}
with httpx.Client(base_url=server, timeout=60) as client:
    signed = client.post("/api/v1/auths/signup", json=user)
    if signed.status_code != 200:
        signed = client.post("/api/v1/auths/signin", json=user)
    client.headers["authorization"] = "Bearer " + signed.raise_for_status().json()["token"]
    client.get("/api/models").raise_for_status()
    messages = [{"role": "system", "content": system}, {"role": "user", "content": question}]
    answer = client.post("/api/chat/completions", json={"model": model, "messages": messages})
    print(answer.raise_for_status().text)
"""


def _open_webui(gateway: str, port: int, home: Path) -> Session:
    settings = {
        "DATA_DIR": str(home / "data"),
        "WEBUI_SECRET_KEY": "none",
        "OPENAI_API_BASE_URL": gateway + "/v1",
        "OPENAI_API_KEY": "none",
        "ENABLE_OLLAMA_API": "False",
        "OFFLINE_MODE": "True",
        "RAG_EMBEDDING_ENGINE": "openai",  # the other would load a model from a hub
        "ANONYMIZED_TELEMETRY": "False",
    }
    return Session(["open-webui", "serve", "--host", "127.0.0.1", "--port", str(port)], settings)


def _open_webui_session(server: str, question: str, home: Path) -> Session:
    system = SYSTEM + "\nIt is {{CURRENT_DATETIME}}."  # another one in each request
    return Session(["python", "-c", _CHAT_OF_OPEN_WEBUI, MODEL, server, system, question])


CLIENTS = (
    Client("langchain", "langchain-openai==1.7.3", _script("python", "-c", _LANGCHAIN)),
    Client(
        "litellm",
        "litellm[proxy]==1.106.0",
        _script("python", "-c", _OPENAI),
        server=_litellm,
        health="/health/liveliness",
    ),
    Client("aider", "aider-chat==0.86.2", _aider),
    Client("openai-npm", "openai@7.57.0", _script("node", "-e", _OPENAI_NPM), npm=True),  # what n8n's node sends with
    Client("opencode", "opencode-ai@1.18.33", _opencode, npm=True),
    Client("claude", "@anthropic-ai/claude-code@2.1.330", _claude, npm=True),
    Client("cline", "cline@3.0.65", _cline, npm=True),
    Client("open-webui", "open-webui==0.12.4", _open_webui_session, server=_open_webui),
    Client("codex", "@openai/codex@0.169.0", _codex, npm=True),
)


pytestmark = [pytest.mark.on_request, pytest.mark.timeout(1200)]


@pytest.mark.parametrize("client", CLIENTS, ids=lambda client: client.name)
def test_the_second_session_of_a_client_hits_what_it_shares(client: Client, fleet: Servers, tmp_path: Path):
    home = tmp_path / "home"
    home.mkdir()
    scripted = {"models": (MODEL,), "template": flat_template, "hits": True, "streams": CLIENT_STREAMS}
    with recording_worker(**scripted) as worker:
        gateway = start_gateway(fleet, worker)
        with client.started(gateway.url, home) as url:

            def session(question: str) -> list[float]:
                printed = client.ask(url, question, home)
                assert any(question.encode() in request.body for request in worker.requests), printed[-4000:]
                wait_for(lambda: worker.is_read)
                names = ("shareable_cached", "shareable", "prompt")
                return [metric(gateway, f"seamark_{name}_tokens_total") for name in names]

            first = session("When is high tide?")
            both = session("Which berth is free?")
    came, shareable, prompt = (after - before for before, after in zip(first, both, strict=True))
    print(f"\n{client.package}, second session: {came:.0f} of {shareable:.0f} shareable, of {prompt:.0f} tokens")
    assert shareable >= 512 and came >= 0.9 * shareable
