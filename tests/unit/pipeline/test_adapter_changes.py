"""An adapter is loaded or unloaded at all workers that it belongs to; what is said of those it did not reach."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock

import httpx
import pytest

from proxy.errors import AdapterNotEverywhere, BadRequest, GatewayError, NoWorker
from proxy.fleet.probe import Probed
from proxy.fleet.worker import Worker
from proxy.http.auth import ApiKey
from proxy.http.client import Broken, Unreachable, Upstream
from proxy.pipeline.adapter_changes import AdapterChanges
from proxy.pipeline.request import ProxiedRequest, request_of
from tests.harness.gateways import SYSTEM, chat
from tests.harness.in_memory_gateway import InMemoryGateway, learnt
from tests.harness.recording_worker import RecordingWorker

LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"

ADAPTER = {"lora_name": "tide-lora", "lora_path": "/x"}


async def ask(own: InMemoryGateway, model: str, question: str) -> httpx.Response:
    return await own.post({**chat(question), "model": model})


def loaded(*workers) -> list[dict[str, str]]:
    return [worker.adapters for worker in workers]


def with_adapters(**state) -> RecordingWorker:
    return RecordingWorker(checks_names=True, adapters={}, **state)


async def test_an_adapter_is_loaded_and_unloaded_at_all_workers_and_known_at_once(in_memory):
    one = with_adapters()
    other = with_adapters()
    own = await in_memory(one, other, health_interval=3600)
    await learnt(own)
    answer = await own.post(ADAPTER, LOAD)
    assert (answer.status_code, answer.text) == (200, "Success: LoRA adapter 'tide-lora' added successfully.")
    assert loaded(one, other) == [{"tide-lora": "/x"}] * 2
    for number in range(12):
        asked = await own.post({"model": "tide-lora", "messages": [SYSTEM, {"role": "user", "content": f"{number}"}]})
        assert asked.status_code == 200 and asked.headers["x-seamark-boundary"]
        assert asked.headers["x-seamark-reason"] != "unpatched"
    assert (await own.get("/v1/models/tide-lora")).json()["parent"] == "m"
    again = await own.post(ADAPTER, LOAD)
    assert again.status_code == 400 and "already been loaded" in again.text
    assert (await own.post({"lora_name": "tide-lora"}, UNLOAD)).status_code == 200 and loaded(one, other) == [{}, {}]
    assert (await ask(own, "tide-lora", "x")).status_code == 404
    assert (await own.post({"lora_name": "tide-lora"}, UNLOAD)).status_code == 404


@pytest.mark.parametrize("failure", ["error", "down", "another path"])
async def test_the_answer_says_which_workers_an_adapter_did_not_reach(in_memory, failure):
    one = with_adapters()
    other = with_adapters()
    own = await in_memory(one, other)
    pool = own.gateway.pool
    if failure == "error":
        other.status = 500
    elif failure == "down":
        pool.check_health = pool.ask_models  # nothing finds it well again
        pool.mark_down(pool.workers[1], "connection refused")
    else:
        other.adapters = {"tide-lora": "/elsewhere"}
    answer = await own.post(ADAPTER, LOAD)
    names = [worker.name for worker in pool.workers]
    message = answer.json()["error"]["message"]
    assert answer.status_code == 502 and f"is loaded at {names[0]}, and not at {names[1]} (" in message
    assert one.adapters == {"tide-lora": "/x"}
    if failure == "error":
        assert {(await ask(own, "tide-lora", f"{number}")).status_code for number in range(4)} == {200}
        other.status = 200
        assert (await own.post(ADAPTER, LOAD)).status_code == 200 and loaded(one, other) == [{"tide-lora": "/x"}] * 2


async def test_where_several_models_take_adapters_the_request_says_whose_it_is(in_memory):
    one = with_adapters(models=("coder",))
    other = with_adapters(models=("writer",))
    own = await in_memory(one, other)
    answer = await own.post(ADAPTER, LOAD)
    assert answer.status_code == 400 and "coder, writer" in answer.text and loaded(one, other) == [{}, {}]
    assert (await own.post({**ADAPTER, "base_model_name": "writer"}, LOAD)).status_code == 200
    assert loaded(one, other) == [{}, {"tide-lora": "/x"}]
    assert (await own.post({**ADAPTER, "base_model_name": "reader"}, LOAD)).status_code == 400
    assert (await own.post({"lora_name": "tide-lora"}, UNLOAD)).status_code == 200 and loaded(one, other) == [{}, {}]


class Said(Upstream):
    """What workers say to a change, by their addresses: a status and a body, or why there is none."""

    def __init__(self, said: dict[str, Any]) -> None:
        super().__init__(1.0, 65536, "the workers' key")
        self.said, self.sent = said, []
        self.may_answer = asyncio.Event()
        self.may_answer.set()

    async def send(self, method, url, headers=(), body=b"", read_timeout=None, fresh=False):
        address = "/".join(url.split("/")[:3])
        self.sent.append((address.removeprefix("http://"), method, url, dict(headers), body, read_timeout, fresh))
        await self.may_answer.wait()
        said = self.said[address.removeprefix("http://")]
        if isinstance(said, Exception):
            raise said
        status, told = said

        async def read() -> bytes:
            return told

        return SimpleNamespace(status=status, read=read, header=lambda name: "text/plain")


class Pool:
    """The workers, each of which can be asked for its list."""

    def __init__(self, workers: list[Worker], ask_models: AsyncMock) -> None:
        self.workers, self.ask_models = workers, ask_models


class Scene:
    """Workers that say what they are told to; all serve the model `m`."""

    def __init__(self, **said: Any) -> None:
        self.upstream = Said(said)
        models = [{"id": "m"}, {"id": "tide-lora", "parent": "m", "root": "/x"}]
        self.workers = [
            Worker(f"http://{name}", None, up=True, probed=Probed(boot=name, models=models))  # type: ignore[arg-type]
            for name in said
        ]
        self.looked = AsyncMock()
        pool = Pool(self.workers, self.looked)
        self.changes = AdapterChanges([pool], self.upstream, 7.0)  # type: ignore[arg-type]
        self.got: list[Any] = []

    def request(self, path: str = LOAD, key: ApiKey | None = None, **body: Any) -> ProxiedRequest:
        async def send(message: Any) -> None:
            self.got.append(message)

        parsed = {"lora_name": "tide-lora", "lora_path": "/x", **body}
        scope = {"method": "POST", "path": path, "query_string": b"", "headers": [(b"x-mine", b"1")]}
        request = request_of(scope, json.dumps(parsed).encode(), "r", key, send)
        request.body.parsed = parsed
        return request

    async def serve(self, path: str = LOAD, **body: Any) -> tuple[int, str]:
        """What the client gets."""
        self.got.clear()
        await self.changes.serve(self.request(path, **body))
        start, answer = self.got
        return start["status"], answer["body"].decode()

    @property
    def asked(self) -> list[str]:
        return [address for address, *_ in self.upstream.sent]


OK, LOADED = (200, b"Success."), (400, b"It has already been loaded.")

NO_ADAPTER, NO_ROUTE_THERE = (404, b"The LoRA adapter cannot be found."), (404, b'{"detail":"Not Found"}')

BAD = (400, b'{"error":{"message":"No such path."}}')


@pytest.mark.parametrize(
    ("path", "said", "status", "text"),
    [
        (LOAD, {"a": OK, "b": OK}, 200, "Success."),
        (LOAD, {"a": LOADED, "b": OK}, 200, "Success."),  # of the same path
        (LOAD, {"a": LOADED, "b": LOADED}, 400, "It has already been loaded."),
        (LOAD, {"a": BAD, "b": BAD}, 400, BAD[1].decode()),
        (LOAD, {"a": NO_ADAPTER}, 404, NO_ADAPTER[1].decode()),
        (LOAD, {"a": NO_ROUTE_THERE, "b": NO_ROUTE_THERE}, 404, NO_ROUTE_THERE[1].decode()),
        (UNLOAD, {"a": OK, "b": NO_ADAPTER}, 200, "Success."),
        (UNLOAD, {"a": NO_ADAPTER, "b": OK}, 200, "Success."),
        (UNLOAD, {"a": NO_ADAPTER, "b": NO_ADAPTER}, 404, NO_ADAPTER[1].decode()),
    ],
)
async def test_what_is_as_asked_for_everywhere_or_refused_alike_is_answered_as_one_worker_does(
    path, said, status, text
):
    scene = Scene(**said)
    assert await scene.serve(path) == (status, text)
    assert sorted(scene.asked) == sorted(said)


@pytest.mark.parametrize(
    ("path", "said", "done", "cause"),
    [
        (LOAD, {"a": OK, "b": BAD}, "a", "b (No such path.)"),
        (LOAD, {"a": BAD, "b": (500, b"")}, "no worker", "a (No such path.); b (it gives no reason)"),
        (LOAD, {"a": OK, "b": (500, b"x" * 300)}, "a", f"b ({'x' * 200})"),
        (LOAD, {"a": OK, "b": (500, b'{"error":7}')}, "a", 'b ({"error":7})'),
        (LOAD, {"a": OK, "b": Broken("")}, "a", "b (it broke off)"),
        (LOAD, {"a": OK, "b": Unreachable("connection refused")}, "a", "b (connection refused)"),
        (LOAD, {"a": Broken("gone"), "b": Broken("gone")}, "no worker", "a (gone); b (gone)"),
        (LOAD, {"a": OK, "b": (201, b"made")}, "a", "b (made)"),
        (UNLOAD, {"a": OK, "b": (500, b"no")}, "a", "b (no)"),
        (UNLOAD, {"a": OK, "b": (400, b"already been loaded")}, "a", "b (already been loaded)"),
    ],
)
async def test_where_it_was_not_done_is_told_with_the_reason(path, said, done, cause):
    scene, verb = Scene(**said), "loaded" if path == LOAD else "unloaded"
    with pytest.raises(AdapterNotEverywhere) as error:
        await scene.serve(path)
    assert f"'tide-lora' is {verb} at {done}, and not at {cause}. " in str(error.value)


@pytest.mark.parametrize("fields", [{"lora_path": "/y"}, {"lora_name": "ebb-lora"}])
async def test_another_adapter_under_the_name_is_not_the_one_that_was_asked_for(fields):
    with pytest.raises(AdapterNotEverywhere):
        await Scene(a=LOADED, b=OK).serve(**fields)


async def test_a_worker_that_is_down_is_not_asked_and_told():
    scene = Scene(a=OK, b=OK)
    scene.workers[1].up, scene.workers[1].words = False, "connection refused"
    with pytest.raises(AdapterNotEverywhere, match=r"loaded at a, and not at b \(connection refused\)"):
        await scene.serve()
    assert scene.asked == ["a"]
    scene.workers[1].words = ""
    with pytest.raises(AdapterNotEverywhere, match=r"b \(down\)"):
        await scene.serve()
    scene.workers[0].up = False
    with pytest.raises(NoWorker):
        await scene.serve()
    assert scene.asked == ["a", "a"]


async def test_the_base_model_that_a_request_names_decides():
    scene = Scene(a=OK, b=OK)
    scene.workers[1].probed = Probed(boot="b", models=[{"id": "n"}])
    assert await scene.serve(base_model_name="n") == (200, "Success.") and scene.asked == ["b"]
    with pytest.raises(BadRequest, match="nobody's") as error:
        await scene.serve(base_model_name="nobody's" + "x" * 300)
    assert error.value.param == "base_model_name" and len(str(error.value)) < 260
    assert isinstance(error.value, GatewayError) and scene.asked == ["b"]


async def test_among_several_models_those_that_have_the_route_decide():
    scene = Scene(a=(400, b"1 validation error"), b=NO_ROUTE_THERE)
    scene.workers[1].probed = Probed(boot="b", models=[{"id": "n"}])
    assert (await scene.serve())[0] == 400
    assert [(address, body) for address, *_, body, _, _ in scene.upstream.sent][:2] == [("a", b"{}"), ("b", b"{}")]
    assert scene.asked == ["a", "b", "a"]
    scene.upstream.said["b"] = (400, b"1 validation error")
    with pytest.raises(BadRequest, match="m, n") as error:
        await scene.serve()
    assert error.value.param == "base_model_name"
    scene.upstream.said |= {"a": NO_ROUTE_THERE, "b": NO_ROUTE_THERE}
    assert (await scene.serve())[0] == 404  # nobody has it: all are asked
