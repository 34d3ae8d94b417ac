"""Prompts that are kept in every worker's cache, and the hot ones that a restarted worker gets back first."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any
from unittest.mock import Mock, call

import httpx
import pytest

from proxy.boundaries.boundary import Boundary, Found
from proxy.chat.chat import CHAT
from proxy.chat.usage import Usage
from proxy.errors import BadRequest, NotFound, PinRefused, SettingsError
from proxy.fleet.hot_prefixes import ENTRY_BYTES, WarmupRequest, WarmupSet
from proxy.fleet.part import Change
from proxy.fleet.worker import Worker
from proxy.fleet.worker_metrics import EngineInfo
from proxy.http.client import Broken, Unreachable
from proxy.metrics import Metrics
from proxy.pipeline import pinned_prompts
from proxy.pipeline.gateway import Gateway
from proxy.pipeline.pinned_prompts import PinnedPrompts
from proxy.pipeline.replayer import Replayed, Replayer, WarmUp
from proxy.routing.engine_events import EngineEvents
from proxy.routing.prefix_index import PrefixIndex
from proxy.settings import Settings
from tests.harness.api_keys import bearer, entry
from tests.harness.gateways import chat
from tests.harness.in_memory_gateway import InMemoryGateway
from tests.harness.probed import pool_of, probed
from tests.harness.recording_worker import RecordingWorker
from tests.harness.scripted_upstream import Said, ScriptedUpstream
from tests.harness.waiting import until

PATH = "/seamark/prefixes"

NOT_READ_YET = {"role": "user", "content": "not read yet"}


@pytest.fixture
def worker() -> RecordingWorker:
    return RecordingWorker(cached=0)


@pytest.fixture
async def own(in_memory, worker) -> InMemoryGateway:
    return await in_memory(worker)


async def pin(own: InMemoryGateway, name: str = "rules", body: Any = None, **more: Any) -> httpx.Response:
    body = chat("Tide?") if body is None else body
    headers = more.pop("headers", {})
    return await own.post({"name": name, "body": body, **more}, PATH, **headers)


def pinned(worker: RecordingWorker) -> int:
    return len(worker.engine.pinned)


async def words(own: InMemoryGateway) -> list[str]:
    """Of each prompt at the one worker."""
    return [word for each in (await own.get(PATH)).json()["prefixes"] for word in each["workers"].values()]


async def is_pinned(own: InMemoryGateway, worker: RecordingWorker) -> bool:
    return pinned(worker) == 1 and await words(own) == ["pinned"]


async def test_one_that_is_taken_back_is_released_and_gone(own, worker, caplog):
    await pin(own)
    worker.status, name = 500, worker.url.split("://")[1]
    answer = await own.client.delete(f"{PATH}/rules")
    assert (answer.status_code, answer.json()["workers"]) == (202, {name: "not_released"}) and pinned(worker) == 1
    worker.status = 200
    await pin(own)
    caplog.clear()
    answer = await own.client.delete(f"{PATH}/rules")
    assert (answer.status_code, answer.json()["workers"]) == (200, {name: "released"})
    assert not pinned(worker) and (await own.get(PATH)).json() == {"prefixes": []}
    assert json.loads(worker.requests[-1].body)["vllm_xargs"]["seamark_pin"] == 0
    assert [record for record in caplog.records if record.name == "seamark.pinned_prompts"] == []
    again = await own.client.delete(f"{PATH}/rules")
    assert again.status_code == 404 and again.json()["error"]["code"] == "not_found"


async def test_a_worker_or_an_adapter_that_lost_it_is_given_it_before_its_requests(own, worker):
    await pin(own)
    worker.requests.clear()
    worker.boot = "1.8e+09"
    await until(lambda: is_pinned(own, worker))
    assert json.loads(worker.requests[0].body)["vllm_xargs"]["seamark_pin"] == 1
    worker.engine.replace_adapter("m")
    await until(lambda: is_pinned(own, worker))


async def test_a_client_cannot_pin(own, worker):
    for xargs in ({"seamark_pin": 1}, {"seamark_pin": 1, "mine": 2}):
        await own.post(chat("Tide?", vllm_xargs=xargs), "/v1/chat/completions")
        sent = json.loads(worker.requests[-1].body)["vllm_xargs"]
        assert "seamark_pin" not in sent and sent.get("mine") == xargs.get("mine")
    files = {"file": ("a.wav", b"RIFF"), "vllm_xargs": (None, '{"seamark_pin": 1}')}
    assert (await own.client.post("/v1/audio/transcriptions", files=files)).status_code == 400
    assert not pinned(worker)


@pytest.mark.parametrize(
    ("wrong", "param", "words"),
    [
        ({"body": chat("?")}, "name", "name"),
        *(({"name": name, "body": chat("?")}, "name", "name") for name in ("", "a/b", "a" * 129, "a\u200b")),
        ({"name": "a", "body": {"messages": [NOT_READ_YET]}}, "body", "body.model"),
        ({"name": "a", "body": {"model": "m", "messages": [NOT_READ_YET, 7]}}, "body", "body.messages"),
        ({"name": "a", "body": chat("?"), "key": "ann"}, "key", "no API keys"),
        ("not an object", None, "object"),
    ],
)
async def test_what_is_no_prompt_is_refused_with_the_field(own, worker, wrong, param, words):
    answer = await own.post(wrong, PATH)
    error = answer.json()["error"]
    assert answer.status_code == 400 and error["param"] == param and words in error["message"]
    assert "harbour" not in answer.text and not worker.requests


async def test_another_sites_page_pins_nothing(own):
    headers = {"sec-fetch-site": "cross-site"}
    assert (await pin(own, headers=headers)).status_code == 403
    assert (await own.client.delete(f"{PATH}/rules", headers=headers)).status_code == 403


async def test_with_keys_it_is_an_operators_and_one_groups(in_memory, worker, tmp_path: Path):
    keys = tmp_path / "keys.toml"
    keys.write_text(entry("ann", share="team") + entry("bob", share="team") + entry("cleo") + entry("root", admin=True))
    own = await in_memory(worker, api_keys=keys)
    admin = bearer("root")
    assert [(await pin(own, headers=headers)).status_code for headers in ({}, bearer("ann"))] == [401, 403]
    assert (await pin(own, headers=admin)).json()["error"]["param"] == "key"
    assert (await pin(own, headers=admin, key="dan")).json()["error"]["param"] == "key"
    assert (await pin(own, headers=admin, key="ann")).status_code == 200
    salts = []
    for name in ("bob", "cleo"):
        await own.post(chat("Ebb?"), "/v1/chat/completions", **bearer(name))
        salts.append(json.loads(worker.requests[-1].body)["cache_salt"])
    ((salt, _),) = worker.engine.pinned
    assert salts[0] == salt != salts[1]
    assert (await pin(own, "cleo's", headers=admin, key="cleo")).status_code == 200
    assert [each for each, _ in worker.engine.pinned] == salts  # what is for cleo is for cleo alone
    assert [(await own.get(PATH, **bearer(name))).status_code for name in ("ann", "root")] == [403, 200]


async def test_what_is_pinned_for_a_key_moves_with_it_to_another_group(in_memory, worker, tmp_path: Path):
    keys, admin = tmp_path / "keys.toml", bearer("root")
    keys.write_text(entry("ann", keep="private") + entry("bob", share="team") + entry("root", admin=True))
    own = await in_memory(worker, api_keys=keys)
    assert (await pin(own, headers=admin, key="ann")).status_code == 200
    ((old, prompt),) = worker.engine.pinned
    keys.write_text(
        entry("ann", keep="private", share="team") + entry("bob", share="team") + entry("root", admin=True) + "\n"
    )
    own.gateway.read_files()
    await until(lambda: pinned(worker) == 1 and worker.engine.pinned[0][0] != old)
    await own.post(chat("Ebb?"), "/v1/chat/completions", **bearer("bob"))
    assert worker.engine.pinned == [(json.loads(worker.requests[-1].body)["cache_salt"], prompt)]
    keys.write_text(entry("ann", keep="private", share="others") + entry("root", admin=True))
    own.gateway.read_files()
    removed = await own.client.delete(f"{PATH}/rules", headers=admin)
    assert (removed.status_code, removed.json()["workers"]) == (200, {worker.url.split("://")[1]: "released"})
    assert pinned(worker) == 0


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (json.dumps([{"name": "a", "body": chat("?")}] * 2), "two prompts are called 'a'"),
        (json.dumps([{"name": f"{number}", "body": chat("?")} for number in range(65)]), "names 65 prompts; 64 can"),
        ('[{"name": "a", "body": {"model": "m"}}]', "'a': body.messages"),
        ('[{"name": "a", "body": {"model": "m", "messages": [{"secret": 1}]}, "key": "ann"}]', "no API keys"),
        ('[{"name": "a", "body": {"model": "m", "messages": [{"secret": NaN}]}}]', "NaN"),
        ('[{"name": "a\\ud800", "body": {"model": "m", "messages": [{}]}}]', "JSON"),
        ('[{"name": "a\\u009b31mRED", "body": {"model": "m", "messages": [{}]}}]', "0.name: it has characters"),
    ],
)
def test_a_file_that_cannot_be_used_stops_the_start_with_one_line(tmp_path: Path, content, words):
    path = tmp_path / "prefixes.json"
    path.write_text(content)
    with pytest.raises(SettingsError) as error:
        Gateway(Settings(prefixes_file=path))
    assert words in str(error.value) and "secret" not in str(error.value) and "prefixes_file" in str(error.value)
    with pytest.raises(SettingsError, match="cannot be read"):
        Gateway(Settings(prefixes_file=tmp_path / "none.json"))


class Scene:
    """Pins before workers that say what they are told to; it stands for the reader and the replayer, too."""

    def __init__(self, *names: str, **settings: Any) -> None:
        engine = EngineInfo("0.3.0", "0.32.0", match_unit=16, block_size=384)
        pool = pool_of(ScriptedUpstream(), *(names or ("a",)), engine=engine)
        self.workers = pool.workers
        for worker in self.workers:
            worker.learn(probed(worker.name, engine, "m", "n"))
        self.said: Any = "pinned"  # a word, an answer, an error, or a function of the worker's name and the wish
        self.sent: list[tuple[str, str, bool]] = []  # to whom, which text, and whether it is to be pinned
        self.found = Found((Boundary("system", b"s", "first:1"),), (b"s",), renderer_id=b"one")
        self.pins = PinnedPrompts(Settings(**settings), pool, None, self, self)  # type: ignore[arg-type]

    async def find_beside(self, request: Any, worker: Worker) -> Found:
        assert request.body.parsed["messages"] and request.model and request.body.memory.size > 0
        return self.found

    async def send(self, worker: Worker, prompt: WarmupRequest, *, pin: bool) -> Replayed:
        self.sent.append((worker.name, json.loads(prompt.raw)["messages"][0]["content"], pin))
        said = self.said(worker.name, pin) if callable(self.said) else self.said
        if isinstance(said, Exception):
            raise said
        if isinstance(said, Replayed):
            return said
        return Replayed(200, b'{"usage": {"prompt_tokens": 100}}', said if pin else "released")

    async def add(self, name: str, text: str = "Tide?", **more: Any) -> dict[str, Any]:
        return await self.pins.add(json.dumps({"name": name, "body": body_of(text, **more)}).encode())

    def words(self) -> dict[str, dict[str, str]]:
        return {each["name"]: each["workers"] for each in self.pins.as_json()}


def body_of(text: str, **more: Any) -> dict[str, Any]:
    return {"model": "m", "messages": [{"role": "system", "content": text}], **more}


async def test_pins_are_added_up_to_the_last_that_fits(monkeypatch):
    scene = Scene()
    for number in range(64):
        await scene.add(f"{number:02}")
    with pytest.raises(BadRequest, match="64 prompts are pinned already") as error:
        await scene.add("one more")
    assert error.value.param == "name"
    await scene.add("00", "Ebb?")  # in the place of one
    assert [each["name"] for each in scene.pins.as_json()] == [f"{number:02}" for number in range(64)]
    few = Scene()
    monkeypatch.setattr(pinned_prompts, "MOST_BYTES", 2 * len(json.dumps(body_of("Tide?"))))
    await few.add("a")
    await few.add("b")
    with pytest.raises(BadRequest, match="together") as error:
        await few.add("b", "Tides?")
    assert error.value.param == "body" and len(few.pins) == 2


async def test_a_prompt_of_the_file_is_changed_there_alone(tmp_path):
    def write(**texts: str) -> None:
        path.write_text(json.dumps([{"name": name, "body": body_of(text)} for name, text in texts.items()]))

    path = tmp_path / "prefixes.json"
    write(old="Tide?", other="Ebb?")
    scene = Scene(prefixes_file=path)
    await scene.add("mine")
    for change in (scene.add("old"), scene.pins.remove("old")):
        with pytest.raises(BadRequest, match="prefixes_file") as error:
            await change
        assert error.value.param == "name"
    with pytest.raises(NotFound):
        await scene.pins.remove("nobody's")
    write(old="Tide?", other="Neap?")
    scene.sent.clear()
    scene.pins.refresh()
    await scene.pins.make_all()
    assert sorted(scene.sent) == [("a", "Ebb?", False), ("a", "Neap?", True)]  # what stays is not sent again
    write(mine="Tide?")
    scene.pins.refresh()
    assert [(each["name"], each["from_file"]) for each in scene.pins.as_json()] == [("mine", True)]


@pytest.mark.parametrize(
    ("said", "word"),
    [
        ("pinned", "pinned"),
        *((Replayed(200, odd, "pinned"), "pinned") for odd in (b"{", b"[1]", b'{"usage":{"prompt_tokens":"x"}}')),
        *((said, "failed") for said in (Replayed(500, b""), Broken("gone"), KeyError("You pilot ships."))),
    ],
)
async def test_what_a_worker_makes_of_a_wish_is_said_in_a_word(caplog, said, word):
    scene = Scene()
    scene.said = said
    shown = await scene.add("rules")
    assert shown["workers"] == {"a": word} == scene.words()["rules"]
    assert ("is not pinned at worker a" in caplog.text) is (word == "failed") and "pilot" not in caplog.text
    assert ("KeyError" in caplog.text) is isinstance(said, KeyError)
    assert shown["tokens"] == (100 if isinstance(said, str) else 0)


async def test_a_prompt_is_refused_if_no_worker_has_room_and_kept_if_any_has():
    scene = Scene("a", "b")
    scene.said = "no_room"
    with pytest.raises(PinRefused, match="SEAMARK_PIN_SHARE"):
        await scene.add("rules")
    assert len(scene.pins) == 0
    scene.said = lambda name, pin: "no_room" if name == "a" else "failed-in-its-own-way"
    assert set((await scene.add("rules"))["workers"].values()) == {"no_room", "failed-in-its-own-way"}
    for worker in scene.workers:
        worker.learn(probed(worker.boot, worker.engine, "n"))
    scene.said = "no_room"
    assert set((await scene.add("more"))["workers"].values()) == {"waiting"}  # nobody serves it


@pytest.mark.parametrize("said", [Replayed(500, b""), Unreachable("refused")])
async def test_a_worker_that_does_not_let_go_is_said_and_told_again_later(monkeypatch, caplog, said):
    now = [1000.0]
    monkeypatch.setattr(pinned_prompts.time, "monotonic", lambda: now[0])
    scene = Scene("a", "b")
    await scene.add("rules")
    scene.said = lambda name, pin: said if name == "a" else "released"
    shown = await scene.pins.remove("rules")
    assert shown["workers"] == {"a": "not_released", "b": "released"}
    assert "is not released at worker a" in caplog.text
    scene.said = "pinned"
    for seconds, sent in ((29.0, []), (1.0, [("a", "Tide?", False)]), (99.0, [])):
        scene.sent.clear()
        now[0] += seconds
        await scene.pins.make_all()
        assert scene.sent == sent


@pytest.mark.parametrize(
    ("change", "model", "lost"),
    [(Change.REMOVED, "", ["rules", "other"]), (Change.ADAPTER, "m", ["rules"]), (Change.DISTRUSTED, "", [])],
)
async def test_what_a_worker_has_lost_is_pinned_there_again(change, model, lost):
    scene = Scene("a", "b")
    await scene.add("rules", "Tide?")
    await scene.add("other", "Ebb?", model="n")
    scene.pins.on_worker(scene.workers[0], change, model)
    for name, words in scene.words().items():
        assert words == {"a": "waiting" if name in lost else "pinned", "b": "pinned"}
    scene.sent.clear()
    await scene.pins.make_all()
    assert {text for _, text, _ in scene.sent} == {{"rules": "Tide?", "other": "Ebb?"}[name] for name in lost}


async def test_at_a_stop_only_what_nobody_could_release_is_let_go():
    for keys, is_let_go in ((None, False), (Mock(salts_last=True), False), (Mock(salts_last=False), True)):
        scene = Scene()
        await scene.add("rules")
        scene.pins._keys = keys
        await scene.pins.let_go()
        assert [pin for _, _, pin in scene.sent].count(False) == len(scene.pins.as_json()) ^ 1 == is_let_go


async def test_in_shadow_mode_nothing_is_pinned(in_memory, worker):
    own = await in_memory(worker, shadow=True)
    assert (await pin(own)).status_code == 200 and await words(own) == ["waiting"] and not worker.requests


async def test_a_restarted_worker_is_given_the_hot_prefixes_first(in_memory):
    worker = RecordingWorker()
    other = RecordingWorker()
    gateway = await in_memory(worker, other, health_interval=0.2)
    for number in range(4):
        owner = (await gateway.post(chat(f"{number}", max_tokens=50, stream=True))).headers["x-seamark-worker"]
    restarted, stays = (worker, other) if owner in worker.url else (other, worker)
    restarted.hold.set()  # the replay takes a while
    restarted.requests.clear()
    restarted.boot = "1.8e+09"
    await until(lambda: restarted.requests)
    sent = json.loads(restarted.requests[0].body)
    assert (sent["max_tokens"], sent["stream"]) == (1, False)
    assert sent["vllm_xargs"]["seamark_boundaries"]
    during = await gateway.post(chat("during"))
    assert during.headers["x-seamark-worker"] in stays.url
    restarted.hold.clear()
    await until(lambda: gateway.metric("seamark_replays_total") >= 1)
    await gateway.shows(lambda status: not any(each["warming"] for each in status["workers"]))


@pytest.mark.parametrize("seconds", [0.2, 3600])
async def test_without_another_worker_nobody_waits_for_a_replay_which_is_bounded(in_memory, worker, seconds):
    gateway = await in_memory(worker, replay_seconds=seconds)
    for number in range(3):
        await gateway.post(chat(f"{number}"))
    worker.held_text = b'"max_tokens":1'  # replays
    worker.hold.set()
    worker.boot = "1.8e+09"
    await until(lambda: any(b'"max_tokens":1' in request.body for request in worker.requests))
    assert (await gateway.post(chat("at once"))).status_code == 200
    if seconds < 1:
        await gateway.shows(lambda status: not any(each["warming"] for each in status["workers"]))
    else:
        assert any(each["warming"] for each in (await gateway.status())["workers"])


FOUND = Found((Boundary("system", b"s", "first:1", estimate=150),), (b"s",), renderer_id=b"one")

PROMPT = WarmupRequest(CHAT, b'{"model":"m"}', ("model",), {}, FOUND, "m")

ENGINE = EngineInfo("0.3.0", "0.32.0", match_unit=16, block_size=384)

PINNED = Said(200, b"{}", headers=[(b"x-seamark-outcome", b"cold,0,0,,pinned")])


@pytest.mark.parametrize("said", [PINNED, Said(503, b"{}"), Broken("gone"), Said(200, Broken("gone"))])
@pytest.mark.parametrize("pin", [None, True])
async def test_a_prefix_counts_as_the_workers_only_if_it_has_computed_it(monkeypatch, said, pin):
    said, told = copy.deepcopy(said), []
    monkeypatch.setattr(EngineEvents, "sent", lambda *_: told.append("sent"))
    monkeypatch.setattr(EngineEvents, "refused", lambda *_: told.append("refused"))
    upstream = ScriptedUpstream(said)
    (worker,) = pool_of(upstream, "w", engine=ENGINE).workers
    index = PrefixIndex(10**6)
    replayer = Replayer(upstream, index, EngineEvents(upstream, index, None, None, None, ""), 5.0)  # type: ignore[arg-type]
    is_whole = isinstance(said, Said) and said.pieces[0] == b"{}"
    is_computed = is_whole and said.status == 200
    if is_whole:
        answer = await replayer.send(worker, PROMPT, pin=pin)
        assert (answer.status, answer.body, answer.pin) == (said.status, b"{}", "pinned" if is_computed else "")
    else:
        with pytest.raises(Broken):
            await replayer.send(worker, PROMPT, pin=pin)
    assert not isinstance(said, Said) or said.closed == 1
    (sent,) = upstream.sent
    assert sent.fresh and sent.headers[b"x-request-id"].startswith(b"own-")
    assert sent.headers[b"authorization"] == b"Bearer the workers' key"
    if pin is None:
        assert (index.sent((b"s",), {worker.boot}) is not None) == is_computed and told == []
    else:
        assert told == (["sent"] if is_computed else ["sent", "refused"])


USED = Said(200, b'{"usage": {"prompt_tokens": 9}}')


@pytest.mark.parametrize(
    ("said", "told"), [(USED, [Usage(9, None)]), (Said(200, b"{"), [None]), (Said(503), []), (Broken(""), [])]
)
async def test_a_replay_is_counted_and_its_cost_if_it_was_computed(said, told):
    kept, metrics, upstream, accounting = WarmupSet(10**6), Metrics(), ScriptedUpstream(said), Mock()
    (worker,) = pool_of(upstream, "w", engine=ENGINE).workers
    part = WarmUp(kept, Replayer(upstream, PrefixIndex(10**6), Mock(), 5.0), accounting, metrics.replays)
    await part.prepare(worker)
    assert upstream.sent == [] and part.held == 0
    kept.add(b"s", 100, (), PROMPT)
    kept.add(b"t", 100, (), PROMPT._replace(model="another worker's"))
    await part.prepare(worker)
    assert len(upstream.sent) == 1 and part.held == kept.held > 0
    labels = {"worker": "w", "result": "done" if told else "failed"}
    assert metrics.registry.get_sample_value("seamark_replays_total", labels) == 1
    assert accounting.replayed.mock_calls == [call("m", worker, usage) for usage in told]
    worker.quarantine()
    await part.prepare(worker)
    assert len(upstream.sent) == 1


def test_hot_prefixes_are_bounded_the_least_recently_used_goes_and_nothing_is_kept_where_no_text_may_be():
    def used(most: int, *keys: bytes) -> WarmupSet:
        prefixes = WarmupSet(most)
        for key in keys:
            if not prefixes.used_again(key):
                prefixes.add(key, 100, (), PROMPT._replace(raw=PROMPT.raw + key))
        return prefixes

    size = len(PROMPT.raw) + 1 + ENTRY_BYTES
    kept = used(2 * size, b"0", b"1", b"0", b"2")
    assert {request.raw[-1:] for request in kept.hottest({"m"})} == {b"0", b"2"} and kept.held <= 2 * size
    assert len(used(3 * size, *(b"%d" % number for number in range(10)))) == 3 and len(used(0, b"0")) == 0
