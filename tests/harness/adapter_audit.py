"""The audit's scheduler behind vLLM's own engine core, with LoRA adapters whose files change under it.

A worker loads adapters as vLLM's does: when it is told to, when a step needs one that it has no room for, in each step
of a request that says so. Whatever it computes remembers the weights that it was computed with; a request that finds
anything of other weights than the worker has for it then is a wrong answer to come.
"""

from __future__ import annotations

import itertools
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

from tests.harness.audit import Scene, random_traffic
from tests.harness.audited_core import Core
from tests.harness.modelled_worker import Worker, begun

WEIGHTS = (1, 2, 3)  # that an adapter's file may have; 0 stands for no adapter

NAMES = ("ada", "bob")

# Of all steps, so many see an adapter's file replaced, loaded again, or its time touched.
REPLACED_SHARE, LOADED_SHARE, TOUCHED_SHARE = 0.03, 0.02, 0.01


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

    def __init__(self, folder: Path, draw: random.Random, room: int) -> None:
        super().__init__()
        self._folder, self._draw, self._room = folder, draw, room
        self._ids = itertools.count(1)
        self.known: dict[str, LoRARequest] = {}  # to an API server, by name
        self._loras: dict[str, LoRARequest | None] = {}  # by request, as it was told
        self.adapters = Adapters()
        self.adapters._adapter_manager.capacity = room

    def start(self) -> None:
        scheduler = self.core.scheduler
        scheduler.lora_config = SimpleNamespace(max_loras=self._room)  # in a step; vLLM has room for no fewer
        self.engine: Any = object.__new__(EngineCore)
        self.engine.scheduler, self.engine.vllm_config = scheduler, scheduler.vllm_config
        self.engine.model_executor = SimpleNamespace(
            add_lora=self.adapters.add_adapter, list_loras=self.adapters.list_adapters
        )
        self.engine.request_block_hasher = self.core.hasher
        self.engine.mm_receiver_cache = None
        self.sent: list[Any] = []  # requests whose hashes are made, and that have not reached the engine's loop

    def arrive(self) -> None:
        """What was sent, in order."""
        for request, wave in self.sent:
            self.engine.add_request(request, wave)
        self.sent.clear()

    def before_step(self) -> None:
        name, act = self._draw.choice(NAMES), self._draw.random()
        in_place = self._draw.random() < 0.5
        if act < REPLACED_SHARE:
            self.write(name, in_place=in_place)
            if self._draw.random() < 0.7:
                self.load(name, in_place=self._draw.random() < 0.5)
        elif act < REPLACED_SHARE + LOADED_SHARE:
            self.load(name, in_place=in_place)
        elif act < REPLACED_SHARE + LOADED_SHARE + TOUCHED_SHARE:
            os.utime(self._folder / name / "adapter_config.json")
        if self._draw.random() < 0.7:
            self.arrive()

    def write(self, name: str, *, in_place: bool = False) -> None:
        """Other contents, of the same size, at an adapter's path."""
        folder = self._folder / name
        folder.mkdir(exist_ok=True)
        (folder / "adapter_config.json").write_text("{}")
        file = folder / "adapter_model.safetensors"
        written = file if in_place else folder / "new"
        written.write_text(str(self._draw.choice(WEIGHTS)))
        os.replace(written, file)

    def load(self, name: str, *, in_place: bool = False) -> None:
        """As `/v1/load_lora_adapter`; not in place, it was unloaded before."""
        known = self.known.get(name)
        number = known.lora_int_id if known is not None and in_place else next(self._ids)
        self.known[name] = LoRARequest(name, number, str(self._folder / name), load_inplace=in_place)
        self.engine.add_lora(self.known[name])

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


class AdapterCore(Core):
    """Requests reach it by vLLM's engine core, some with an adapter. Their hashes are made a while before they come."""

    def request(
        self, name: str, tokens: Any, hint: Any = None, max_tokens: int = 1, salt: str | None = None, **more: Any
    ) -> Any:
        """With an adapter or with none."""
        worker: Any = self.worker
        extra = more["extra"] | ({"seamark_boundaries": hint} if hint else {})
        parameters = SamplingParams(max_tokens=max_tokens, ignore_eos=True, extra_args=extra or None)
        if "seamark_keep" in extra and extra["seamark_keep"] != "low":
            self.unkept.add(name)
        parameters.update_from_generation_config({}, None)
        lora = worker._draw.choice([*worker.known.values(), None])
        asked = EngineCoreRequest(name, list(tokens), None, parameters, None, 0.0, lora, salt, None)
        worker.tokens[name] = list(tokens)
        worker.sent.append(worker.engine.preprocess_add_request(asked))
        self.ever[name] = worker.sent[-1][0]
        return self.ever[name]

    @property
    def waiting(self) -> int:
        return super().waiting + len(self.worker.sent)

    def run(self, most: int = 2000) -> None:
        self.worker.arrive()
        super().run(most)


def scenes(model: str, wanted: dict[str, Any], options: dict[str, Any]) -> Iterator[Scene]:
    """`options`: `room` for so many adapters, and arguments of `Core`."""
    others = {name: value for name, value in options.items() if name != "room"}
    for seed in wanted["seeds"]:
        with tempfile.TemporaryDirectory() as folder:
            worker = AdapterWorker(Path(folder), random.Random(seed), options.get("room", 2))
            core = AdapterCore(model, worker=worker, **others)
            for name in NAMES:
                worker.write(name)
                worker.load(name)
            yield Scene(f"seed {seed}", [core], partial(random_traffic, core, seed, wanted["chats"]))
