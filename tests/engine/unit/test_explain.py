"""What states cost in real models: computed here from the published figures, by vLLM, and by `--explain`.

What is said of such figures: `tests/unit/engine/test_explain.py`.
"""

from __future__ import annotations

import importlib.util
import math
import subprocess
import sys

import pytest

from engine_patches.commands.explain import GIB
from tests.harness import recipe_models
from tests.harness.recipe_models import PUBLISHED, Explained


@pytest.fixture(scope="module")
def explained() -> dict[str, Explained]:
    return recipe_models.explained()


@pytest.mark.thorough  # vLLM configures each in a process of its own
@pytest.mark.parametrize("name", PUBLISHED)
def test_bytes_and_blocks_are_those_of_the_published_figures_and_of_vllm(explained, name):
    model, (cost, blocks, text, newest_runner) = PUBLISHED[name], explained[name]
    assert newest_runner  # as on a GPU, which this machine has not
    page = 2 * model.convolution + model.state_bytes * model.state
    assert (cost.recurrent_layers, cost.attention_layers) == (model.recurrent, model.attention)
    assert cost.state_bytes == model.recurrent * page
    # A block is as long as its KV needs to be as large as a layer's state, and cache groups are as large as the smaller
    # kind has layers.
    tokens = math.ceil(page / (model.step * model.kv)) * model.step
    layers = min(model.recurrent, model.attention)
    assert cost.block_tokens == tokens and cost.block_bytes == layers * tokens * model.kv
    assert cost.state_blocks == math.ceil(model.recurrent / layers) and cost.attention_groups == 1
    assert cost.displaced_tokens == cost.state_blocks * tokens
    assert blocks == 64 * GIB // cost.block_bytes
    assert cost.states_in(64 * GIB) == blocks // cost.state_blocks
    assert f"{cost.displaced_tokens:,} tokens of KV" in text


@pytest.mark.thorough  # vLLM inspects the class in a process
@pytest.mark.skipif(importlib.util.find_spec("torchvision") is not None, reason="nothing is missing here")
def test_a_library_that_a_model_s_class_lacks_is_named_in_one_sentence(tmp_path):
    recipe_models.write_models(tmp_path, ["Qwen3.6-27B"])
    command = [sys.executable, "-m", "engine_patches", "worker", "--explain", "gpu", str(tmp_path / "Qwen3.6-27B")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1 and done.stdout == ""
    line = done.stderr.splitlines()[-1]
    assert line.startswith("seamark worker: vLLM cannot configure")
    assert line.endswith("its class Qwen3_5ForConditionalGeneration needs torchvision, which is not installed here")
