"""The audit's scheduler behind vLLM's own engine core, with LoRA adapters whose files change under it.

A worker loads adapters as vLLM's does: when it is told to, when a step needs one that it has no room for, in each step
of a request that says so. Whatever it computes remembers the weights that it was computed with; a request that finds
anything of other weights than the worker has for it then is a wrong answer to come.
"""

from __future__ import annotations

import os
import random
import tempfile
from collections import OrderedDict
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from vllm.lora.model_manager import LRUCacheLoRAModelManager
from vllm.lora.request import LoRARequest
from vllm.lora.worker_manager import LRUCacheWorkerLoRAManager
from vllm.sampling_params import SamplingParams
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.core import EngineCore

from tests.harness.audit import Scene
from tests.harness.audited_core import Core
from tests.harness.modelled_worker import Worker, begun

WEIGHTS = (1, 2, 3)  # that an adapter's file may have; 0 stands for no adapter

NAMES = ("ada", "bob")

HEAD = 300  # tokens that all prompts share


class Room(LRUCacheLoRAModelManager):
    """What the worker holds: weights by id, in a room for `capacity` adapters."""

    capacity = 2

    def __init__(self) -> None:
        self.held: OrderedDict[int, SimpleNamespace] = OrderedDict()

    def __len__(self) -> int:
        return len(self.held)

    def add_adapter(self, adapter: Any) -> bool:
        self.held[adapter.id] = adapter
        return True

    def remove_adapter(self, adapter_id: int) -> bool:
        return self.held.pop(adapter_id, None) is not None

    def remove_oldest_adapter(self) -> bool:
        self.held.popitem(last=False)
        return True

    def get_adapter(self, adapter_id: int) -> Any:
        return self.held.get(adapter_id)

    def activate_adapter(self, adapter_id: int) -> bool:
        self.held.move_to_end(adapter_id)
        return True


class Adapters(LRUCacheWorkerLoRAManager):
    """vLLM's, without a model."""

    def __init__(self) -> None:
        self._adapter_manager = Room()

    def _load_adapter(self, lora_request: LoRARequest) -> Any:
        weights = int((Path(lora_request.lora_path) / "adapter_model.safetensors").read_text())
        return SimpleNamespace(id=lora_request.lora_int_id, weights=weights)

    def list_adapters(self) -> set[int]:
        return set(self._adapter_manager.held)

    def weights(self, lora: LoRARequest) -> int:
        """What the step that begins computes a request with."""
        self.add_adapter(lora)
        return int(self._adapter_manager.held[lora.lora_int_id].weights)


class AdapterWorker(Worker):
    """Of an engine with adapters. Its tokens are pairs with the weights that have computed them.

    What a request leaves while its adapter changes is nobody's: judged is what is found.
    """

    judges_keys = False

    counted = ("adapter_hit_tokens",)

    def __init__(self, room: int = 2) -> None:
        super().__init__()
        self._room = room
        self._loras: dict[str, LoRARequest | None] = {}  # by request, as it was told
        self.adapters = Adapters()
        self.adapters._adapter_manager.capacity = room

    def start(self) -> None:
        scheduler = self.core.scheduler
        scheduler.lora_config = SimpleNamespace(max_loras=self._room)  # in a step; vLLM has room for no fewer
        self.engine: Any = object.__new__(EngineCore)
        self.engine.scheduler = scheduler
        self.engine.model_executor = SimpleNamespace(
            add_lora=self.adapters.add_adapter, list_loras=self.adapters.list_adapters
        )
        self.engine.request_block_hasher = self.core.hasher
        self.engine.mm_receiver_cache = None
        self._between: list[Any] = []  # requests whose hashes are made, and that have not reached the engine's loop

    def send(self, name: str, tokens: list[int], lora: LoRARequest | None, hint: list[int]) -> None:
        """Its hashes are made; `arrive` brings it into the scheduler."""
        parameters = SamplingParams(max_tokens=4, ignore_eos=True, extra_args={"seamark_boundaries": hint})
        parameters.update_from_generation_config({}, None)
        made = EngineCoreRequest(name, list(tokens), None, parameters, None, 0.0, lora, None, None)
        self.tokens[name] = list(tokens)
        self._between.append(self.engine.preprocess_add_request(made))

    def arrive(self) -> None:
        """What was sent, in order."""
        for request, wave in self._between:
            self.engine.add_request(request, wave)
        self._between.clear()

    def receive(self, output: Any) -> dict[str, int]:
        starts, begin = super().receive(output), begun(output)
        self._loras.update((new.req_id, new.lora_request) for new in output.scheduled_new_reqs)
        weights: dict[int, int] = {}
        for name in output.num_scheduled_tokens:
            if (lora := self._loras[name]) is not None:
                weights[lora.lora_int_id] = self.adapters.weights(lora)
        for name, count in output.num_scheduled_tokens.items():
            lora, tokens, start = self._loras[name], self.tokens[name], starts[name]
            own = weights[lora.lora_int_id] if lora is not None else 0
            plain = [token[0] if isinstance(token, tuple) else token for token in tokens]
            if name in begin:
                tokens[:] = [(token, own) for token in plain[:start]] + plain[start:]
                self.core.counts["adapter_hit_tokens"] += start if lora is not None else 0
            tokens[start : start + count] = [(token, own) for token in plain[start : start + count]]
        return starts


class Files:
    """Adapters in a folder, and what an API server knows of them."""

    def __init__(self, folder: Path, draw: random.Random) -> None:
        self.folder, self._draw = folder, draw
        self.known: dict[str, LoRARequest] = {}
        self._ids = 0

    def write(self, name: str, *, in_place: bool = False) -> None:
        """Other contents, of the same size, at an adapter's path."""
        folder = self.folder / name
        folder.mkdir(exist_ok=True)
        (folder / "adapter_config.json").write_text("{}")
        file = folder / "adapter_model.safetensors"
        if in_place:
            file.write_text(str(self._draw.choice(WEIGHTS)))
        else:
            (folder / "new").write_text(str(self._draw.choice(WEIGHTS)))
            os.replace(folder / "new", file)

    def load(self, core: Core, name: str, *, in_place: bool) -> None:
        """As `/v1/load_lora_adapter`; not in place, it was unloaded before."""
        if not in_place or name not in self.known:
            self._ids += 1
        known = self.known.get(name)
        number = known.lora_int_id if known is not None and in_place else self._ids
        lora = LoRARequest(name, number, str(self.folder / name), load_inplace=in_place)
        core.worker.engine.add_lora(lora)
        self.known[name] = lora


def random_traffic(core: Core, seed: int, operations: int, folder: Path) -> None:
    """Requests with two adapters and with none, while their files are replaced, loaded, touched and loaded again."""
    draw = random.Random(seed)
    files = Files(folder, draw)
    head = [draw.randrange(1000) for _ in range(HEAD)]
    for name in NAMES:
        files.write(name)
        files.load(core, name, in_place=False)
    for number in range(operations):
        name, act = draw.choice(NAMES), draw.random()
        if act < 0.7:
            shared = draw.choice((200, HEAD))
            tokens = head[:shared] + [draw.randrange(1000) for _ in range(draw.randrange(1, 40))]
            lora = draw.choice((files.known[name], files.known[name], None))
            core.worker.send(f"{seed}-{number}", tokens, lora, [shared])
        elif act < 0.8:
            files.write(name, in_place=draw.random() < 0.5)
            if draw.random() < 0.7:
                files.load(core, name, in_place=draw.random() < 0.5)
        elif act < 0.85:
            files.load(core, name, in_place=draw.random() < 0.5)
        elif act < 0.87:
            os.utime(files.folder / name / "adapter_config.json")
        if draw.random() < 0.7:
            core.worker.arrive()
        while len(core.scheduler.waiting) > 4 or (core.scheduler.requests and draw.random() < 0.6):
            core.step()
    core.worker.arrive()
    core.run()


def scenes(model: str, wanted: dict[str, Any], options: dict[str, Any]) -> Iterator[Scene]:
    """`options`: `room` for so many adapters, and arguments of `Core`."""
    options = dict(options)
    room = options.pop("room", 2)
    for seed in wanted["seeds"]:
        core = Core(model, worker=AdapterWorker(room), **options)
        with tempfile.TemporaryDirectory() as folder:
            play = partial(random_traffic, core, seed, wanted["operations"], Path(folder))
            yield Scene(f"seed {seed}", [core], play)
