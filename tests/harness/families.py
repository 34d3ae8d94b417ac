"""Every hybrid model that vLLM registers, the recurrent layers it is made of, and what the plugin does with them.

`python -m tests.harness.families` writes the table in engine_patches/README.md. vLLM's source is read and nothing of it
is imported: most of these models want a GPU's kernels for that.
"""

from __future__ import annotations

import ast
import textwrap
from collections.abc import Iterator, Mapping
from functools import cache, cached_property
from pathlib import Path
from typing import NamedTuple

from engine_patches import families
from engine_patches.families import RecurrentLayer
from tests.harness.versions import source_of

DOCUMENT = Path(__file__).parents[2] / "engine_patches" / "README.md"

VERSION = "0.33.0"

BEGIN = "<!-- families: `python -m tests.harness.families` writes this table -->\n"
END = "<!-- /families -->\n"

DRAFTS = "_SPECULATIVE_DECODING_MODELS"  # of the registry: heads of other models

BASE = "MambaBase"  # of all recurrent layers

HYBRID, ATTENTION_FREE = "IsHybrid", "IsAttentionFree"

MODELS = ("vllm.models.", "vllm.model_executor.models.")  # where classes of models are

# Models that look their language model up in the registry by a name.
WRAPPED = {
    "vllm.model_executor.models.nano_nemotron_vl:NemotronH_Nano_VL_V2": "NemotronHForCausalLM",
    "vllm.model_executor.models.lfm2_vl:Lfm2VLForConditionalGeneration": "Lfm2ForCausalLM",
    "vllm.models.kimi_k3.nvidia.model:KimiK3ForConditionalGeneration": "KimiLinearForCausalLM",
    "vllm.models.kimi_k3.amd.model:KimiK3ForConditionalGeneration": "KimiLinearForCausalLM",
}

# Both come from one class, and a full-rank gate decides what it makes.
CHOSEN = {"KimiLinearForCausalLM": families.KIMI_KDA, "KimiK3ForConditionalGeneration": families.K3_KDA}

GPUS = ("nvidia", "amd")  # packages of models that are written for one kind of GPU

NAMED = {layer.path: layer for layer in (*families.INSIDE, *families.CUT)}


class NotNamed(Exception):
    """A recurrent layer of vLLM's that `engine_patches.families` does not name."""


class Class(NamedTuple):
    """A class in vLLM's source."""

    module: str
    name: str

    @property
    def path(self) -> str:
        """As `families` has it."""
        return f"{self.module}:{self.name}"


class Module:
    """One module's syntax tree, and where its names come from."""

    def __init__(self, name: str, file: Path) -> None:
        self.name = name
        self.tree = ast.parse(file.read_text())
        self.package = name if file.name == "__init__.py" else name.rpartition(".")[0]

    @cached_property
    def definitions(self) -> Mapping[str, ast.AST]:
        """Classes, functions and values at the top level, also inside an `if` there, by name."""
        found: dict[str, ast.AST] = {}
        for node in _top_level(self.tree):
            if isinstance(node, ast.ClassDef | ast.FunctionDef):
                found[node.name] = node
            elif isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                found |= {target.id: node.value for target in targets if isinstance(target, ast.Name)}
        return found

    @cached_property
    def mentions(self) -> Mapping[str, frozenset[tuple[str, bool]]]:
        """What each definition mentions, by its name, and whether it calls that."""
        found = {}
        for name, definition in self.definitions.items():
            nodes = list(ast.walk(definition))
            called = {node.func.id for node in nodes if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)}
            found[name] = frozenset((node.id, node.id in called) for node in nodes if isinstance(node, ast.Name))
        return found

    @cached_property
    def imports(self) -> Mapping[str, list[Class]]:
        """What each imported name may be, wherever in the module it is imported."""
        found: dict[str, list[Class]] = {}
        for node in ast.walk(self.tree):
            if isinstance(node, ast.ImportFrom):
                package = self.package.rsplit(".", node.level - 1)[0] if node.level else ""
                source = ".".join(filter(None, (package, node.module)))
                for alias in node.names:
                    found.setdefault(alias.asname or alias.name, []).append(Class(source, alias.name))
        return found


def _top_level(tree: ast.Module | ast.If) -> Iterator[ast.AST]:
    for node in (*tree.body, *getattr(tree, "orelse", ())):
        if isinstance(node, ast.If):
            yield from _top_level(node)
        else:
            yield node


_read = cache(Module)


class Source:
    """A vLLM's Python files. `gpu`: whose variant of a model is read where there are two."""

    def __init__(self, root: Path, gpu: str = GPUS[0]) -> None:
        self.root = root
        self.left_out = tuple(f".{each}." for each in GPUS if each != gpu)
        self._modules: dict[str, Module | None] = {}

    def module(self, name: str) -> Module | None:
        """None if there is no such file."""
        if name not in self._modules:
            stem = self.root.joinpath(*name.split("."))
            files = (stem.with_name(f"{stem.name}.py"), stem / "__init__.py")
            file = next((each for each in files if each.is_file()), None)
            self._modules[name] = None if file is None else _read(name, file)
        return self._modules[name]

    def models(self) -> Mapping[str, Class]:
        """The registered architectures but draft heads, and the class of each."""
        registry = self.module("vllm.model_executor.models.registry")
        assert registry is not None, f"{self.root} holds no vLLM"
        found = {}
        for name, value in registry.definitions.items():
            if name.endswith("_MODELS") and name != DRAFTS and isinstance(value, ast.Dict):
                for key, entry in zip(value.keys, value.values, strict=True):
                    if isinstance(key, ast.Constant) and isinstance(entry, ast.Tuple):
                        module, model = (ast.literal_eval(part) for part in entry.elts)
                        module = module if module.startswith("vllm.") else f"vllm.model_executor.models.{module}"
                        found[str(key.value)] = self.found(Class(module, model))
        return found

    def found(self, wanted: Class) -> Class:
        """Where a name that a module may have imported is defined; as it is if that is not in vLLM's source."""
        for each in self._candidates(wanted):
            return each
        return wanted

    def _candidates(self, wanted: Class) -> Iterator[Class]:
        module = self.module(wanted.module)
        if module is None:
            return
        if wanted.name in module.definitions:
            yield wanted
            return
        for source in module.imports.get(wanted.name, ()):
            if source != wanted and not any(part in f"{source.module}." for part in self.left_out):
                yield from self._candidates(source)

    def is_a(self, model: Class, base: str) -> bool:
        """Whether a class derives from one of this name."""
        return any(each.name == base for each in self.ancestors(model))

    def ancestors(self, model: Class) -> Iterator[Class]:
        """A class and those that it derives from, the nearest first."""
        model = self.found(model)
        yield model
        module = self.module(model.module)
        node = module.definitions.get(model.name) if module is not None else None
        if isinstance(node, ast.ClassDef):
            for base in node.bases:
                if isinstance(base, ast.Name):
                    yield from self.ancestors(Class(model.module, base.id))

    def recurrent_layers(self, model: Class) -> set[Class]:
        """The classes of recurrent layers that a model's class makes, itself or in what it is made of."""
        layers: set[Class] = set()
        seen: set[Class] = set()
        rest = [model]
        while rest:
            found = self.found(rest.pop())
            module = self.module(found.module)
            if found in seen or module is None or found.name not in module.definitions:
                continue
            seen.add(found)
            if found.path in WRAPPED:
                rest.append(self.models()[WRAPPED[found.path]])
            for name, called in module.mentions[found.name]:
                target = self.found(Class(found.module, name))
                if self.is_a(target, BASE):
                    layers |= {target} if called else set()
                elif target.module.startswith(MODELS):
                    rest.append(target)
        return layers

    def named(self, layer: Class) -> RecurrentLayer:
        """A layer in `families`: itself, or what it derives from without another core. Raises `NotNamed`."""
        methods: set[str] = set()
        for each in self.ancestors(layer):
            module, known = self.module(each.module), NAMED.get(each.path)
            if known is not None and known.core not in methods:
                return known
            node = module.definitions.get(each.name) if module is not None else None
            methods |= {part.name for part in getattr(node, "body", ()) if isinstance(part, ast.FunctionDef)}
        raise NotNamed(f"engine_patches/families.py does not name {layer.path}")


class Family(NamedTuple):
    """Architectures whose recurrent layers are the same."""

    layers: tuple[RecurrentLayer, ...]
    attention_free: bool
    architectures: tuple[str, ...]


def families_of(source: Source) -> list[Family]:
    """All that a vLLM registers, those first of which most are. Raises `NotNamed`."""
    found: dict[tuple[tuple[RecurrentLayer, ...], bool], list[str]] = {}
    order = list(NAMED.values())
    for architecture, model in source.models().items():
        attention_free = source.is_a(model, ATTENTION_FREE)
        if attention_free or source.is_a(model, HYBRID):
            made = {source.named(layer) for layer in source.recurrent_layers(model)}
            chosen = CHOSEN.get(architecture)
            made = {each for each in made if chosen is None or each.name == chosen.name}
            found.setdefault((tuple(sorted(made, key=order.index)), attention_free), []).append(architecture)
    for layers, attention_free in found:
        if not layers and not attention_free:
            raise NotNamed(f"no recurrent layers were found in {', '.join(found[layers, attention_free])}")
    every = [Family(layers, free, tuple(sorted(names))) for (layers, free), names in found.items() if layers]
    return sorted(every, key=lambda each: (each.attention_free, [order.index(layer) for layer in each.layers]))


SHOWN = {
    families.Shown.ENGINE: "on an engine",
    families.Shown.INTERPRETER: "in the interpreter",
    families.Shown.READ: "read",
}


def table(source: Source) -> str:
    """Of all that a vLLM registers, as for NVIDIA's GPUs."""
    rows: dict[tuple[str, ...], list[str]] = {}
    for family in families_of(source):
        kinds = " and ".join(dict.fromkeys(layer.kind.name for layer in family.layers))
        rows.setdefault((kinds, *_what_is_done(family)), []).extend(family.architectures)
    lines: list[tuple[str, ...]] = [("architecture", "states", "written", "shown", "beside drafts"), ("---",) * 5]
    lines += [(", ".join(f"`{name}`" for name in sorted(names)), *row) for row, names in rows.items()]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _what_is_done(family: Family) -> tuple[str, str, str]:
    """The last three columns."""
    if family.attention_free:
        return "at the ends of cache blocks, as vLLM alone does", SHOWN[families.shown_of(family.layers)], "refused"
    inside = all(layer.core for layer in family.layers)
    beside = inside and all(layer.drafts for layer in family.layers)
    return (
        "inside a pass" if inside else "cut: a pass for each",
        SHOWN[families.shown_of(family.layers)],
        "on trial first" if beside else "refused",
    )


def on_rocm(nvidia: Source, amd: Source) -> str:
    """What AMD's GPUs have otherwise, in two sentences."""
    inside = " and ".join(dict.fromkeys(layer.kind.name for layer in families.INSIDE if layer.on_rocm))
    known = {name: family.layers for family in families_of(nvidia) for name in family.architectures}
    other = [name for each in families_of(amd) for name in each.architectures if each.layers != known.get(name)]
    names = ", ".join(f"`{name}`" for name in other)
    said = (
        f"On AMD's GPUs states of {inside} are written inside a pass, and a chunk is cut for all others; {names} have "
        "layers of their own there."
    )
    return textwrap.fill(said, 136, break_long_words=False) + "\n"  # as wide as the document


def generated() -> str:
    """What stands between the markers."""
    source = source_of(VERSION)
    nvidia, amd = (Source(source, gpu) for gpu in GPUS)
    return f"{table(nvidia)}\n{on_rocm(nvidia, amd)}"


def with_table(text: str, between: str) -> str:
    """The document with the table."""
    before, _, rest = text.partition(BEGIN)
    return before + BEGIN + between + END + rest.partition(END)[2]


if __name__ == "__main__":
    DOCUMENT.write_text(with_table(DOCUMENT.read_text(), generated()))
