"""Whose weights compute a request: where it is not certain, nothing is found under its adapter's name."""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import msgspec
import pytest

from engine_patches.scheduler import adapters
from tests.harness.waiting import wait_for


class Lora(msgspec.Struct):
    """vLLM's `LoRARequest`."""

    lora_name: str
    lora_path: str
    lora_int_id: int = 1
    load_inplace: bool = False
    tensorizer_config_dict: dict[str, str] | None = None
    is_3d_lora_weight: bool = False


def written(folder: Path, weights: str = "weights", config: str = "{}", file: str = adapters.WEIGHTS[0]) -> Path:
    """The files of an adapter."""
    folder.mkdir(exist_ok=True)
    (folder / adapters.CONFIG).write_text(config)
    (folder / file).write_text(weights)
    return folder


def asked(folder: Path, name: str, number: int = 1, **more: Any) -> Lora:
    """vLLM's request for an adapter of `folder`, which is written."""
    return Lora(name, str(written(folder, folder.name)), number, **more)


def touch(lora: Lora) -> None:
    """The same contents, as files that have changed."""
    os.utime(Path(lora.lora_path) / adapters.CONFIG, ns=(1, 1))


def fails(lora: Lora) -> None:
    raise RuntimeError("no room")


@pytest.fixture(autouse=True)
def files_answer_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapters, "LOOK_SECONDS", 60.0)


def held_by(held: adapters.Adapters, lora: Any) -> Any:
    adapter = held.of(lora)
    assert adapter is not None
    return adapter


@pytest.mark.parametrize(("folder", "name"), [("one", "other"), ("other", "one")], ids=["name", "path"])
def test_of_two_adapters_under_one_id_the_first_alone_is_certain(tmp_path: Path, folder: str, name: str):
    """Several API servers count ids of their own, and the workers hold one adapter under each."""
    held, first, second = adapters.Adapters(), asked(tmp_path / "one", "one"), asked(tmp_path / folder, name)
    kept = held_by(held, first)
    assert kept.key.name == "one" and held.of(second) is None
    assert held.of(msgspec.structs.replace(first)) is kept
    beside = held_by(held, msgspec.structs.replace(second, lora_int_id=2))
    assert beside.key != kept.key, "under an id of its own it is certain"


def test_a_tag_stands_for_what_the_files_say_and_not_for_where_they_lie(tmp_path: Path):
    folders = {
        "one": written(tmp_path / "one"),
        "the same elsewhere": written(tmp_path / "two"),
        "of which vLLM reads the first": written(written(tmp_path / "six", "others", file=adapters.WEIGHTS[1])),
        "other weights": written(tmp_path / "three", "others"),
        "another configuration": written(tmp_path / "four", config="{ }"),
        "another kind of file": written(tmp_path / "five", file=adapters.WEIGHTS[1]),
    }
    tags = [held_by(adapters.Adapters(), Lora("a", str(folder))).key.tag for folder in folders.values()]
    tags.append(held_by(adapters.Adapters(), Lora("a", str(folders["one"]), is_3d_lora_weight=True)).key.tag)
    assert tags[0] == tags[1] == tags[2] and len({*tags}) == 5 and all(len(tag) == 64 for tag in tags)


def test_an_adapter_is_found_where_vllm_finds_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    written(tmp_path / "here")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    asked_of_the_hub: list[tuple[str, bool]] = []

    def download(path: str, *, local_files_only: bool) -> Path:
        asked_of_the_hub.append((path, local_files_only))
        if path != "team/adapter":
            raise OSError
        return tmp_path / "here"

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    places = ("here", "~/here", "team/adapter", "team/none", "/none")
    assert [path for path in places if adapters.Adapters().of(Lora("a", path))] == [*places[:3]]
    assert asked_of_the_hub == [("team/adapter", True)] * 3 + [("team/none", True)]  # before, for it, and as it is used
    assert adapters.Adapters().of(asked(tmp_path / "a", "a", tensorizer_config_dict={"dir": "elsewhere"})) is None


@pytest.mark.parametrize("in_place", [False, True])
def test_files_that_change_are_not_certain_until_they_are_loaded_again(tmp_path: Path, engine_log, in_place: bool):
    held, lora = adapters.Adapters(), asked(tmp_path / "a", "a", load_inplace=in_place)
    before = held_by(held, lora)
    held.load(lora, lambda _: None)
    assert held.of(lora) is before, "they are as they were"
    touch(lora)
    assert held.of(lora) is None and held.of(lora) is None
    assert len(engine_log.messages) == (not in_place)  # one that is loaded in each step is about to be read
    assert held.load(lora, lambda _: "loaded") == "loaded"
    # Nobody knows what computed under the tag of before, though the contents are the same.
    assert held_by(held, lora).key.tag != before.key.tag and not before.computes(lora)


def test_files_that_do_not_answer_hold_up_nobody_and_nothing_of_them_is_certain_until_they_do(tmp_path, monkeypatch):
    held, lora, other = adapters.Adapters(), asked(tmp_path / "a", "a"), asked(tmp_path / "b", "b", 2)
    answers, hashes, digest = threading.Event(), threading.Event(), hashlib.file_digest

    def opened(path: str, mode: str) -> Any:
        return open(path, mode) if not path.startswith(lora.lora_path) or answers.wait(60) else None

    monkeypatch.setattr(adapters, "LOOK_SECONDS", 0.5)
    monkeypatch.setattr(adapters, "open", opened, raising=False)
    monkeypatch.setattr(hashlib, "file_digest", lambda *of: digest(*of) if hashes.wait(60) else None)
    for ready in (answers, hashes):
        for _ in range(200):  # of which one waits
            assert held.of(lora) is None
        ready.set()
        wait_for(lambda: held.signature(lora))
        if ready is answers:
            assert held.of(lora) is None, "the workers may have read what the files were before"
            held.load(lora, lambda _: None)
    wait_for(lambda: held.of(lora))
    kept = held_by(held, lora)
    assert kept.key.tag == held_by(adapters.Adapters(), lora).key.tag
    answers.clear()
    assert not kept.computes(lora) and held.of(lora) is None and held_by(held, other).key.name == "b"
    answers.set()
    wait_for(lambda: held.of(lora) is kept)
    hashes.clear()
    again = msgspec.structs.replace(lora, lora_int_id=3)  # as another of vLLM's API servers calls it
    assert held.of(again) is None and held.of(lora) is kept
    for _ in range(2):
        held.load(lora, lambda _: None)
        assert held.of(lora) is None
    hashes.set()
    wait_for(lambda: held.load(lora, lambda _: True) and held.of(lora))


def test_a_load_that_fails_or_reads_what_changes_meanwhile_leaves_nothing_certain(tmp_path: Path):
    held, lora = adapters.Adapters(), asked(tmp_path / "a", "a")
    before = held_by(held, lora)
    with pytest.raises(RuntimeError, match="no room"):
        held.load(lora, fails)
    assert held.of(lora) is None and not before.computes(lora)
    held.load(lora, lambda _: None)
    assert held.of(lora) is not None
    held.load(lora, touch)
    assert held.of(lora) is None


def test_what_was_held_under_an_id_stays_certain_for_nobody_once_another_is_loaded_there(tmp_path: Path):
    held, one, other = adapters.Adapters(), asked(tmp_path / "one", "one"), asked(tmp_path / "other", "other")
    kept = held_by(held, one)
    held.load(other, lambda _: None)
    assert held.of(other) is not None and held.of(one) is None and not kept.computes(one)


def made_request(lora: Lora | None, **marks: Any) -> Any:
    """A vLLM `Request` whose hashes are made of what `hash_contents` adds."""

    class Request(SimpleNamespace):
        def update_block_hashes(self) -> None:
            self.block_hashes.append(("made", getattr(self, "seamark_adapter_tag", None)))

    return Request(lora_request=lora, block_hashes=["before"], _block_hasher=object(), **marks)


class Engine:
    """As much of vLLM's `EngineCore` as adapters come through."""

    def __init__(self, *, states: bool = True, loads: Callable[[Lora], Any] = lambda _: True) -> None:
        self.replaced: list[str] = []
        told = SimpleNamespace(adapter_replaced=self.replaced.append)
        self.scheduler = SimpleNamespace(seamark=SimpleNamespace(states=told if states else None))
        self.loads, self.loaded, self.held, self.added = loads, [], set(), []

    def list_loras(self) -> set[int]:
        return self.held

    def _load(self, lora: Lora) -> Any:
        self.loaded.append(lora)
        answer = self.loads(lora)
        self.held.add(lora.lora_int_id)
        return answer

    def add_lora(self, lora: Lora) -> Any:
        return adapters.note_loads(Engine._load)(self, lora)

    def preprocess(self, request: Any) -> Any:
        """Make a request's hashes, as vLLM does beside the engine's loop."""
        hashes = adapters.hash_contents(lambda _: [("lora", request.lora_request.lora_name)])

        def own(engine: Any, request: Any) -> Any:
            request.block_hashes = [hashes(request)]
            return request

        return adapters.know_adapters_of_requests(own)(self, request)

    def add(self, request: Any) -> None:
        adapters.admit_by_adapter(lambda engine, request, wave: self.added.append((request, wave)))(self, request, 7)


def test_hashes_hold_the_contents_that_the_engine_has_loaded_or_what_no_other_has(tmp_path: Path):
    engine, lora, hashes = Engine(), asked(tmp_path / "a", "a"), adapters.hash_contents(lambda _: [("lora", "a")])
    request = engine.preprocess(made_request(lora))
    assert request.block_hashes == [[("lora", "a", request.seamark_adapter.key.tag)]] and not adapters.is_alone(request)
    assert adapters.hash_contents(lambda _: [])(made_request(None)) == [] and not adapters.is_alone(made_request(None))
    one, other = made_request(lora), made_request(lora)
    ((*_, first),), ((*_, second),) = hashes(one), hashes(other)
    assert first != second and adapters.is_alone(one) and hashes(one) == [("lora", "a", first)], "and stays so"


def test_a_request_whose_adapter_was_loaded_again_meanwhile_is_hashed_again(tmp_path: Path):
    engine, lora = Engine(), asked(tmp_path / "a", "a")
    request, early = engine.preprocess(made_request(lora)), engine.preprocess(made_request(lora))
    hashes = list(early.block_hashes)
    engine.add(early)
    assert early.block_hashes == hashes  # nothing has changed
    (tmp_path / "a" / adapters.WEIGHTS[0]).write_text("changed")
    engine.add_lora(msgspec.structs.replace(lora, load_inplace=True))
    engine.add(request)
    assert request.block_hashes == [("made", request.seamark_adapter.key.tag)] and not adapters.is_alone(request)
    assert request.seamark_adapter is not early.seamark_adapter and engine.replaced == ["a"]


def test_a_request_that_loads_its_adapter_has_it_loaded_before_its_first_step_if_it_is_not(tmp_path: Path):
    engine, lora = Engine(), asked(tmp_path / "a", "a", load_inplace=True)
    for _ in range(2):
        request = made_request(lora)
        engine.add(request)
        assert request.lora_request == msgspec.structs.replace(lora, load_inplace=False)
        assert request.seamark_adapter is not None
    assert engine.loaded == []  # it is as it was noted
    (tmp_path / "a" / adapters.WEIGHTS[0]).write_text("changed")
    engine.add(request := made_request(lora))
    assert engine.loaded == [lora] and request.seamark_adapter is not None and engine.replaced == ["a"]


def test_a_request_whose_adapter_does_not_load_finds_nothing_and_goes_on(tmp_path: Path, engine_log):
    engine = Engine(loads=fails)
    request = made_request(lora := Lora("a", str(tmp_path / "nowhere"), load_inplace=True))
    engine.add(request)
    assert engine.added == [(request, 7)] and adapters.is_alone(request) and request.lora_request is lora
    assert "adapter a was not loaded: RuntimeError" in engine_log.messages[-1]


def test_a_request_is_looked_up_by_the_adapter_that_is_held_then(tmp_path: Path):
    looked_up: list[list[Any]] = []

    def original(manager: Any, request: Any, longest: int) -> int:
        looked_up.append(list(request.block_hashes))
        return longest

    look_up, engine, lora = adapters.look_up_by_adapter(original), Engine(), asked(tmp_path / "a", "a")
    plain, request = made_request(None), engine.preprocess(made_request(lora))
    hashes = list(request.block_hashes)
    assert [look_up(None, plain, 7), look_up(None, request, 7)] == [7, 7]
    touch(lora)
    look_up(None, request, 7)
    assert looked_up == [["before"], hashes, [("made", request.seamark_adapter_tag)]]
    assert adapters.is_alone(request)
