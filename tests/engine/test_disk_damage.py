"""Whatever happens to a checkpoint directory: nothing wrong, no start that hangs, no hit lost to a neighbour's file."""

from __future__ import annotations

import itertools
import os
import random
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest
from transformers import AutoTokenizer

from proxy.bench.harness.planted import plugin_environment
from proxy.bench.harness.servers import NEMOTRON_H, QWEN3_NEXT, Server, Servers, generated_model
from tests.harness import damaged_files
from tests.harness.damaged_files import EVERYTHING, Lost, let_go
from tests.harness.engines import FLOAT32_DELTA
from tests.harness.restarts import KEEP_ALL, Round, ask, counted, kill, rounds_of, start, written
from tests.harness.scheduler_process import run_forked
from tests.harness.transfer_engine import Prompt

FORMS = ("Mamba2", "gated delta net")


@pytest.mark.parametrize("form", [FORMS[0], pytest.param(FORMS[1], marks=pytest.mark.thorough)])
@pytest.mark.parametrize(
    "when",
    ["at a start", *(pytest.param(when, marks=pytest.mark.thorough) for when in ("each file", "while it runs"))],
)
def test_a_damage_costs_what_it_hit_and_is_healed_and_what_is_not_ours_stays(model: Path, form, when):
    found = run_forked("damage_audit", str(model), form, when)
    print(f"{form}, {when}: {len(found)} damages, {sum(map(len, found.values()))} wrong")
    assert len(found) >= 23 and {name: wrong for name, wrong in found.items() if wrong} == {}


class Stored(NamedTuple):
    """A directory that an engine has filled, and what one that starts on it finds."""

    prompts: Sequence[Prompt]
    files: list[list[str]]  # by the prompt for which they were written
    folder: Path
    right: Round  # answers of an engine that caches nothing
    undamaged: Round


class Engines(NamedTuple):
    """Engines of a family, all with the same numerics."""

    fleet: Servers
    model: Path
    environment: dict[str, str]
    flags: tuple[str, ...]

    def start(self, name: str, folder: Path) -> Server:
        """One with a directory."""
        return start(self.fleet, self.model, name, folder, *KEEP_ALL, *self.flags, **self.environment)


@pytest.fixture(scope="module", params=[NEMOTRON_H, QWEN3_NEXT])
def engines(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    folder = tmp_path_factory.mktemp("damage")
    delta = FLOAT32_DELTA if request.param == QWEN3_NEXT else {}
    plugins = {"seamark_disk": "tests.harness.disk_defects:loads_always_pay", **delta}
    with Servers(folder) as fleet:
        environment = dict(plugin_environment(folder / "plugins", plugins))
        yield Engines(fleet, generated_model(print, request.param), environment, ("--dtype", "float32"))


@pytest.fixture(scope="module")
def stored(engines: Engines, tmp_path_factory: pytest.TempPathFactory) -> Stored:
    folder = tmp_path_factory.mktemp("stored") / "states"
    (first, _), names = rounds_of(AutoTokenizer.from_pretrained(engines.model)), set[str]()
    prompts, files = first[::4], []
    off = ("--no-enable-prefix-caching", *engines.flags)
    reference = start(engines.fleet, engines.model, "uncached", None, *off, mode="reference", **engines.environment)
    right = ask(reference, prompts)
    reference.stop()
    engine = engines.start("storing", folder)
    for prompt in prompts:
        ask(engine, [prompt])
        files.append(sorted({path.name for path in written(folder)} - names))
        names.update(files[-1])
    kill(engine)
    engine = engines.start("undamaged", Path(shutil.copytree(folder, folder.with_name("undamaged"))))
    undamaged = ask(engine, prompts)
    kill(engine)
    assert undamaged.differing(right) == 0 and all(answer.cached_tokens for answer in undamaged.answers)
    return Stored(prompts, files, folder, right, undamaged)


@pytest.mark.on_request
def test_an_engine_whose_files_are_damaged_each_in_its_own_way_answers_right(
    engines: Engines, stored: Stored, tmp_path
):
    """Files of all prompts but the last two, whose hits stay."""
    draw, root = random.Random(9), Path(shutil.copytree(stored.folder, tmp_path / "states"))
    kinds = [each.apply for each in EVERYTHING if each.lost is Lost.ITS_OWN and not each.told]
    kinds += [damaged_files.strange_names, damaged_files.another_model, damaged_files.linked_folders]
    victims = [name for names in stored.files[:-2] for name in names]
    damages = list(zip(itertools.cycle(victims), kinds, strict=False))
    (folder,) = {path.parent for path in root.rglob("*.state")}
    for name, apply in damages:
        path = folder / name
        if not path.is_file() or path.is_symlink() or path.stat().st_size < 8192:
            shutil.copy(stored.folder / folder.name / name, path, follow_symlinks=False)
        apply(
            draw, path, folder / draw.choice([each for each in victims if each != name and (folder / each).is_file()])
        )
    engine = engines.start("damaged", root)
    found = ask(engine, stored.prompts)
    told = counted(engine)
    kill(engine)
    hits = [answer.cached_tokens for answer in found.answers]
    print(f"{engines.model.name}: {len(damages)} damages, {found.differing(stored.right)} wrong, hits {hits}")
    assert found.differing(stored.right) == 0 and told["seamark_checkpoint_files_refused_total"] > 0
    assert hits[-2:] == [answer.cached_tokens for answer in stored.undamaged.answers[-2:]]


@pytest.mark.on_request
@pytest.mark.parametrize("damage", [damaged_files.lock_is_held, damaged_files.open_to_all, damaged_files.fifo])
def test_an_engine_starts_whatever_the_directory_is_like(engines: Engines, stored: Stored, tmp_path, damage):
    root = Path(shutil.copytree(stored.folder, tmp_path / "states"))
    path, other = sorted(root.rglob("*.state"))[:2]
    damage(random.Random(1), path, other)
    before = set(os.listdir("/dev/shm"))
    try:
        engine = engines.start("started", root)
        found = ask(engine, stored.prompts)
        log = engine.log.read_text(errors="replace")
        kill(engine)
    finally:
        let_go()
    assert found.differing(stored.right) == 0
    assert log.count("seamark: the checkpoint directory") == (damage is not damaged_files.fifo)
    assert not [name for name in set(os.listdir("/dev/shm")) - before if name.startswith("vllm_offload_")]
