"""The audit's scheduler behind vLLM's own engine core, with LoRA adapters whose files change under it.

A worker loads adapters as vLLM's does: when it is told to, when a step needs one that it has no room for, in each step
of a request that says so. Whatever it computes remembers the weights that it was computed with; a request that finds
anything of other weights than the worker has for it then is a wrong answer to come.

Run as `python -m tests.harness.adapter_audit MODEL '{"seeds": [1], "operations": 200, "cores": [{}]}'`. Prints JSON.
"""

from __future__ import annotations

import json
import os
import random
import sys
import tempfile
from collections import OrderedDict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from vllm.lora.model_manager import LRUCacheLoRAModelManager
from vllm.lora.request import LoRARequest
from vllm.lora.worker_manager import LRUCacheWorkerLoRAManager
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import init_none_hash
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.core import EngineCore

from engine_patches import ledger
from engine_patches.patches import PATCHES
from tests.harness.scheduler_audit import Core

CONTENTS = ("first weights", "other weights", "third weights")

NAMES = ("ada", "bob")

HEAD = 300  # tokens that all prompts share


class Room(LRUCacheLoRAModelManager):
    """What the worker holds: contents by id, in a room for `capacity` adapters."""

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


class Workers(LRUCacheWorkerLoRAManager):
    """vLLM's, without a model."""

    def __init__(self) -> None:
        self._adapter_manager = Room()

    def _load_adapter(self, lora_request: LoRARequest) -> Any:
        contents = (Path(lora_request.lora_path) / "adapter_model.safetensors").read_text()
        return SimpleNamespace(id=lora_request.lora_int_id, contents=contents)

    def list_adapters(self) -> set[int]:
        return set(self._adapter_manager.held)

    def contents(self, lora: LoRARequest | None) -> str:
        """What the step that begins computes a request with."""
        if lora is None:
            return ""
        self.add_adapter(lora)
        return self._adapter_manager.held[lora.lora_int_id].contents


class AdapterCore(Core):
    """An engine core with adapters. Its worker's tokens are pairs with the weights that have computed them."""

    def __init__(self, model: str, room: int = 2, **options: Any) -> None:
        super().__init__(model, **options)
        self.scheduler.lora_config = SimpleNamespace(max_loras=room)  # in a step; vLLM has room for no fewer
        self.workers = Workers()
        self.workers._adapter_manager.capacity = room
        self.engine: Any = object.__new__(EngineCore)
        self.engine.scheduler = self.scheduler
        self.engine.model_executor = SimpleNamespace(
            add_lora=self.workers.add_adapter, list_loras=self.workers.list_adapters
        )
        self.engine.request_block_hasher = self.hasher
        self.engine.mm_receiver_cache = None
        self.between: list[Any] = []  # requests whose hashes are made, and that have not reached the engine's loop
        self.checked: dict[str, str] = {}  # by request: the weights that the worker had when it was (re)started
        self.hit_tokens = 0  # of requests with an adapter

    def send(self, name: str, tokens: list[int], lora: LoRARequest | None, hint: list[int]) -> None:
        """Its hashes are made; `receive` brings it into the scheduler."""
        parameters = SamplingParams(max_tokens=4, ignore_eos=True, extra_args={"seamark_boundaries": hint})
        parameters.update_from_generation_config({}, None)
        made = EngineCoreRequest(name, list(tokens), None, parameters, None, 0.0, lora, None, None)
        self._tokens[name] = list(tokens)
        self.between.append(self.engine.preprocess_add_request(made))

    def receive(self) -> None:
        """What was sent, in order."""
        for request, wave in self.between:
            self._ever.append(request)
            self.engine.add_request(request, wave)
        self.between.clear()

    def _receive(self, output: Any) -> dict[str, int]:
        starts = super()._receive(output)
        begin = {new.req_id for new in output.scheduled_new_reqs} | set(output.scheduled_cached_reqs.resumed_req_ids)
        loras = {new.req_id: new.lora_request for new in output.scheduled_new_reqs}
        self._loras = {**getattr(self, "_loras", {}), **loras}  # as the worker was told of them
        weights: dict[int, str] = {}
        for name in output.num_scheduled_tokens:
            if (lora := self._loras[name]) is not None:
                weights[lora.lora_int_id] = self.workers.contents(lora)
        for name, count in output.num_scheduled_tokens.items():
            lora, tokens, start = self._loras[name], self._tokens[name], starts[name]
            own = weights[lora.lora_int_id] if lora is not None else ""
            plain = [token[0] if isinstance(token, tuple) else token for token in tokens]
            if name in begin:
                tokens[:] = [(token, own) for token in plain[:start]] + plain[start:]
                self.hit_tokens += start if lora is not None else 0
            tokens[start : start + count] = [(token, own) for token in plain[start : start + count]]
        return starts

    def _record_meanings(self) -> None:
        """What a request leaves while its adapter changes is nobody's: judged is what is found."""

    _check_keys = _check_events = _record_meanings


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
            file.write_text(self._draw.choice(CONTENTS))
        else:
            (folder / "new").write_text(self._draw.choice(CONTENTS))
            os.replace(folder / "new", file)

    def load(self, core: AdapterCore, name: str, *, in_place: bool) -> None:
        """As `/v1/load_lora_adapter`; not in place, it was unloaded before."""
        if not in_place or name not in self.known:
            self._ids += 1
        known = self.known.get(name)
        number = known.lora_int_id if known is not None and in_place else self._ids
        lora = LoRARequest(name, number, str(self.folder / name), load_inplace=in_place)
        core.engine.add_lora(lora)
        self.known[name] = lora


def random_traffic(core: AdapterCore, seed: int, operations: int, folder: Path) -> None:
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
            core.send(f"{seed}-{number}", tokens, lora, [shared])
        elif act < 0.8:
            files.write(name, in_place=draw.random() < 0.5)
            if draw.random() < 0.7:
                files.load(core, name, in_place=draw.random() < 0.5)
        elif act < 0.85:
            files.load(core, name, in_place=draw.random() < 0.5)
        elif act < 0.87:
            os.utime(files.folder / name / "adapter_config.json")
        if draw.random() < 0.7:
            core.receive()
        while len(core.scheduler.waiting) > 4 or (core.scheduler.requests and draw.random() < 0.6):
            core.step()
    core.receive()
    core.run()


def main(model: str, argument: str) -> None:
    """`{"seeds": [..], "operations": n, "without": [beginnings of patches' names], "cores": [arguments, ...]}`."""
    wanted = json.loads(argument)
    init_none_hash(sha256)
    without = tuple(wanted.get("without", ()))
    ledger.apply([patch for patch in PATCHES if not patch.name.startswith(without)] if without else PATCHES)
    found = []
    for options in wanted["cores"]:
        errors, hit_tokens = [], 0
        for seed in wanted["seeds"]:
            core = AdapterCore(model, **options)
            with tempfile.TemporaryDirectory() as folder:
                random_traffic(core, seed, wanted["operations"], Path(folder))
            if core.blocks_in_use():
                core.errors.append(f"{core.blocks_in_use()} blocks are held without a request")
            errors += [f"seed {seed}: {error}" for error in core.errors[:3]]
            hit_tokens += core.hit_tokens
        found.append({"core": options, "errors": errors, "hit_tokens": hit_tokens})
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:3])
