"""The table of families: what is documented, what the code knows, and what vLLM's source holds."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from engine_patches import families
from tests.harness import families as documented
from tests.harness.families import BEGIN, CHOSEN, DOCUMENT, END, VERSION, Class, NotNamed, Source
from tests.harness.recipe_models import MODELS
from tests.harness.versions import source_of

MIXER = "vllm.model_executor.layers.mamba.mamba_mixer2"


@pytest.fixture(scope="module")
def installed() -> Source:
    spec = importlib.util.find_spec("vllm")
    assert spec is not None and spec.origin is not None
    return Source(Path(spec.origin).parents[1])


def rows() -> list[list[str]]:
    """Of the documented table: architectures, states, how they are written, how shown, beside drafts."""
    between = DOCUMENT.read_text().partition(BEGIN)[2].partition(END)[0]
    lines = [line for line in between.splitlines() if line.startswith("| `")]
    return [line.strip("| ").split(" | ") for line in lines]


@pytest.mark.parametrize("layer", families.INSIDE, ids=lambda layer: layer.path.partition(":")[0].rpartition(".")[2])
def test_a_layer_that_writes_inside_a_pass_is_in_vllm_and_in_the_table(installed, layer):
    module, _, name = layer.path.partition(":")
    methods = [
        part.name
        for each in installed.ancestors(Class(module, name))
        if (source := installed.module(each.module)) is not None
        for part in getattr(source.definitions.get(each.name), "body", ())
        if hasattr(part, "name")
    ]
    assert layer.core in methods, f"{layer.path} has no {layer.core}"
    documented_as = [row for row in rows() if layer.kind.name in row[1].split(" and ") and row[2] == "inside a pass"]
    assert documented_as, f"no row of {DOCUMENT.name} is of {layer.kind.name}"


@pytest.mark.thorough  # reads the Python source of another vLLM
def test_the_documented_table_is_that_of_the_source():
    text = DOCUMENT.read_text()
    assert text == documented.with_table(text, documented.generated()), "run: python -m tests.harness.families"


@pytest.mark.thorough  # reads the Python source of another vLLM
def test_the_layers_that_a_recipe_s_config_tells_are_those_that_vllm_makes_of_it():
    source = Source(source_of(VERSION))
    registered = source.models()
    for name, config in MODELS.items():
        (architecture,) = config["architectures"]
        chosen = CHOSEN.get(architecture)
        made = {source.named(layer) for layer in source.recurrent_layers(registered[architecture])}
        told = set(families.layers_in(config.get("text_config", config)))
        assert told == ({chosen} if chosen is not None else made), name


def toy(tmp_path: Path, layer: str) -> Source:
    """The source of a vLLM with one hybrid model, whose layers are of a class `Layer`."""
    models = "vllm/model_executor/models"
    files = {
        f"{models}/registry.py": '_TEXT_GENERATION_MODELS = {"ToyForCausalLM": ("toy", "Toy")}',
        f"{models}/toy.py": "from .toy_layers import Layer\nfrom .interfaces import IsHybrid\n"
        "class Block:\n    def __init__(self): self.mixer = Layer()\n"
        "KINDS = {'mamba': Block}\n"
        "class Toy(IsHybrid):\n    def __init__(self): self.layers = [KINDS['mamba']()]\n",
        f"{models}/interfaces.py": "class IsHybrid: ...",
        f"{models}/toy_layers.py": layer,
        f"{MIXER.replace('.', '/')}.py": "from .abstract import MambaBase\n"
        "class MambaMixer2(MambaBase):\n    def conv_ssm_forward(self): ...\n",
        "vllm/model_executor/layers/mamba/abstract.py": "class MambaBase: ...",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return Source(tmp_path)


def test_a_layer_is_known_by_what_it_derives_from(tmp_path):
    source = toy(tmp_path, f"from {MIXER} import MambaMixer2\nclass Layer(MambaMixer2): ...")
    assert documented.families_of(source) == [((families.MAMBA2_MIXER,), False, ("ToyForCausalLM",))]


@pytest.mark.parametrize(
    "layer",
    [
        "from vllm.model_executor.layers.mamba.abstract import MambaBase\nclass Layer(MambaBase): ...",
        f"from {MIXER} import MambaMixer2\nclass Layer(MambaMixer2):\n    def conv_ssm_forward(self): ...",
    ],
    ids=["of its own", "with another core"],
)
def test_a_layer_that_nobody_has_named_stops_the_table_by_its_name(tmp_path, layer):
    with pytest.raises(NotNamed, match=r"toy_layers:Layer"):
        documented.families_of(toy(tmp_path, layer))
