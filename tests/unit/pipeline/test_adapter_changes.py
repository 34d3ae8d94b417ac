"""An adapter is loaded or unloaded at all workers that it belongs to; what is said of those it did not reach."""

from __future__ import annotations

import json
from typing import Any
from unittest.mock import AsyncMock

import pytest

from proxy.errors import AdapterNotEverywhere, BadRequest, GatewayError, NoWorker
from proxy.fleet.probe import Probed
from proxy.fleet.worker import Worker
from proxy.http.auth import ApiKey
from proxy.http.client import Broken, Unreachable
from proxy.pipeline.adapter_changes import AdapterChanges
from proxy.pipeline.request import ProxiedRequest, request_of
from tests.harness.gateways import chat
from tests.harness.in_memory_gateway import learnt
from tests.harness.probed import pool_of
from tests.harness.recording_worker import RecordingWorker
from tests.harness.scripted_upstream import Said, ScriptedUpstream, Sent

LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"

ADAPTER = {"lora_name": "tide-lora", "lora_path": "/x"}


async def test_an_adapter_is_loaded_and_unloaded_at_all_workers_and_known_at_once(in_memory):
    workers = [RecordingWorker(checks_names=True, adapters={}) for _ in range(2)]
    own = await in_memory(*workers, health_interval=3600)
    await learnt(own)
    workers[1].status = 500
    assert (await own.post(ADAPTER, LOAD)).status_code == 502 and workers[0].adapters == {"tide-lora": "/x"}
    assert (await own.post(chat("x", model="tide-lora"))).status_code == 200
    workers[1].status = 200
    answer = await own.post(ADAPTER, LOAD)
    assert (answer.status_code, answer.text) == (200, "Success: LoRA adapter 'tide-lora' added successfully.")
    assert [worker.adapters for worker in workers] == [{"tide-lora": "/x"}] * 2
    for number in range(12):
        asked = await own.post(chat(f"{number}", model="tide-lora"))
        assert asked.status_code == 200 and asked.headers["x-seamark-boundary"]
        assert asked.headers["x-seamark-reason"] != "unpatched"
    assert (await own.get("/v1/models/tide-lora")).json()["parent"] == "m"
    assert (await own.post({"lora_name": "tide-lora"}, UNLOAD)).status_code == 200
    assert [worker.adapters for worker in workers] == [{}, {}]
    assert (await own.post(chat("x", model="tide-lora"))).status_code == 404


class Scene:
    """Workers that say what they are told to, by their names; all serve the model `m`."""

    def __init__(self, **said: Any) -> None:
        self.said, self.upstream = said, ScriptedUpstream(say=self._say)
        self.pool = pool_of(self.upstream, *said)
        self.workers = self.pool.workers
        for worker in self.workers:
            self.lists(worker, {"id": "m"}, {"id": "tide-lora", "parent": "m", "root": "/x"})
        self.pool.ask_models = AsyncMock()  # type: ignore[method-assign]
        self.changes = AdapterChanges([self.pool], self.upstream, 7.0)
        self.got: list[Any] = []

    @staticmethod
    def lists(worker: Worker, *cards: dict[str, str]) -> None:
        worker.probed = Probed(boot=worker.name, models=[*cards])

    def _say(self, sent: Sent) -> Said | Exception:
        said = self.said[sent.worker]
        return said if isinstance(said, Exception) else Said(*said, headers=[(b"content-type", b"text/plain")])

    def request(self, path: str = LOAD, key: ApiKey | None = None, **body: Any) -> ProxiedRequest:
        async def send(message: Any) -> None:
            self.got.append(message)

        parsed = {"lora_name": "tide-lora", "lora_path": "/x", **body}
        scope = {"method": "POST", "path": path, "query_string": b"", "headers": [(b"x-mine", b"1")]}
        request = request_of(scope, json.dumps(parsed).encode(), "r", key, send)
        request.body.parsed = parsed
        return request

    async def serve(self, path: str = LOAD, **body: Any) -> tuple[int, str]:
        self.got.clear()
        await self.changes.serve(self.request(path, **body))
        start, answer = self.got
        return start["status"], answer["body"].decode()

    @property
    def asked(self) -> list[str]:
        return [sent.worker for sent in self.upstream.sent]


OK, LOADED = (200, b"Success."), (400, b"It has already been loaded.")

NO_ADAPTER, NO_ROUTE_THERE = (404, b"The LoRA adapter cannot be found."), (404, b'{"detail":"Not Found"}')

BAD = (400, b'{"error":{"message":"No such path."}}')


@pytest.mark.parametrize(
    ("path", "said", "status", "text"),
    [
        (LOAD, {"a": OK, "b": OK}, 200, "Success."),
        (LOAD, {"a": LOADED, "b": OK}, 200, "Success."),  # of the same path
        (LOAD, {"a": LOADED, "b": LOADED}, 400, "It has already been loaded."),
        (LOAD, {"a": NO_ROUTE_THERE, "b": NO_ROUTE_THERE}, 404, NO_ROUTE_THERE[1].decode()),
        (UNLOAD, {"a": OK, "b": NO_ADAPTER}, 200, "Success."),
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
        (LOAD, {"a": OK, "b": Broken("")}, "a", "b (it broke off)"),
        (LOAD, {"a": OK, "b": Unreachable("connection refused")}, "a", "b (connection refused)"),
        (UNLOAD, {"a": OK, "b": (500, b"no")}, "a", "b (no)"),
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
    scene.lists(scene.workers[1], {"id": "n"})
    assert await scene.serve(base_model_name="n") == (200, "Success.") and scene.asked == ["b"]
    with pytest.raises(BadRequest, match="nobody's") as error:
        await scene.serve(base_model_name="nobody's" + "x" * 300)
    assert error.value.param == "base_model_name" and len(str(error.value)) < 260
    assert isinstance(error.value, GatewayError) and scene.asked == ["b"]


async def test_among_several_models_those_that_have_the_route_decide():
    scene = Scene(a=(400, b"1 validation error"), b=NO_ROUTE_THERE)
    scene.lists(scene.workers[1], {"id": "n"})
    assert (await scene.serve())[0] == 400
    assert [(sent.worker, sent.body) for sent in scene.upstream.sent][:2] == [("a", b"{}"), ("b", b"{}")]
    assert scene.asked == ["a", "b", "a"]
    scene.said["b"] = (400, b"1 validation error")
    with pytest.raises(BadRequest, match="m, n") as error:
        await scene.serve()
    assert error.value.param == "base_model_name"
    scene.said |= {"a": NO_ROUTE_THERE, "b": NO_ROUTE_THERE}
    assert (await scene.serve())[0] == 404  # nobody has it: all are asked
