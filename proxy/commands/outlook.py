"""What will hit, by a recipe's flags and its model's name alone: no model is loaded, and no vLLM is asked.

The plugin knows it better once an engine starts, and `seamark worker MODEL FLAGS --explain gpu` before that, where vLLM
is installed. What this table says of a family is what the plugin has for it (tests/engine/unit/test_outlook.py).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from proxy.commands.recipe import Recipe
from proxy.errors import SettingsError

# As the plugin's settings have it.
SUPPORTED, IMAGE = "0.31 to 0.33", "vllm/vllm-openai:v0.33.0"

FIRST, LAST = (0, 31), (0, 33)

# Methods of drafts beside which the plugin gives hints.
METHODS = ("mtp", "ngram", "eagle", "eagle3", "dflash", "dspark")

# KV connectors with which vLLM starts no hybrid model.
NOT_SERVED = ("ExampleConnector", "FlexKVConnectorV1", "HF3FSKVConnector", "LMCacheConnectorV1", "LMCacheMPConnector")

# Flags that vLLM had, and with which a newer one does not start, or which it warns of.
DROPPED: Mapping[str, str] = {"--mamba-cache-mode": "vLLM keeps states where hits can be resumed by itself"}

CACHING, NO_CACHING = "--enable-prefix-caching", "--no-enable-prefix-caching"
DRAFTS, CONNECTOR = ("--speculative-config", "-sc"), ("--kv-transfer-config",)

# Names and flags of a fork of vLLM.
FORK, FORK_FLAGS = "b12x", ("--gdn-decode-kernel", "--prefill-compute-share", "--max-parallel-prefills")


class KnownFamily(NamedTuple):
    """Models whose states are alike."""

    states: str  # what they are called
    words: Sequence[str]  # of which a model's name has one
    unit: int  # tokens of which a hit is a multiple, unless a flag says otherwise
    beside_drafts: bool = True  # whether there are hints beside drafts
    inside: bool = True  # whether its states are kept inside a pass; otherwise each costs one


FAMILIES = (
    KnownFamily("gated delta nets and n-grams", ("flash-next", "qwen4-exp"), 64),
    KnownFamily("gated delta nets", ("qwen3-next", "qwen3.5", "qwen3.6", "qwen3.8"), 64),
    KnownFamily("gated delta nets of Olmo", ("olmo-hybrid",), 64, beside_drafts=False),
    KnownFamily("Mamba2", ("nemotron-3", "nemotron-h", "granite-4", "falcon-h1", "bamba", "zamba2"), 16),
    KnownFamily("KDA", ("glm-5.3-flash", "ling-3", "kimi-linear", "kimi-k3"), 64),
    KnownFamily("short convolutions", ("lfm2",), 16, beside_drafts=False),
    KnownFamily("Mamba1", ("jamba",), 16, beside_drafts=False, inside=False),
    KnownFamily("linear attention", ("ling-2.5", "minimax-text"), 16, beside_drafts=False, inside=False),
)

# vLLM's parser of a model's tool calls, by a part of its name.
TOOL_PARSERS = {
    "qwen3-next": "hermes",
    "qwen3-coder": "qwen3_xml",
    "qwen3.": "qwen3_xml",
    "nemotron-3": "qwen3_xml",
    "glm-5.3": "glm47",
    "granite-4": "granite4",
    "lfm2": "lfm2",
}


class Outlook(NamedTuple):
    hits: bool | None  # None: not to be told from here
    verdict: str  # one sentence
    change: str = ""  # the one that hits wait for; empty: none
    notes: Sequence[str] = ()


def family_of(model: str) -> KnownFamily | None:
    """By a model's name, or the name of its folder."""
    name = model.lower().replace("_", "-")
    return next((family for family in FAMILIES if any(word in name for word in family.words)), None)


def outlook(recipe: Recipe, version: str = "") -> Outlook:
    """`version`: of the vLLM in the recipe's image, if its labels tell it; otherwise its tag is believed."""
    notes = [*recipe.notes, *(f"{flag} is taken away: {why}" for flag, why in DROPPED.items() if recipe.has(flag))]
    if recipe.has(NO_CACHING):
        notes.append(f"{NO_CACHING} is taken away: without a prefix cache nothing can hit")
    family, drafts = family_of(recipe.model), recipe.fields(*DRAFTS)
    if obstacle := next(_obstacles(recipe, family, version), None):
        why, change = obstacle
        return Outlook(False, f"no hits yet: {why}", change, notes)
    if family is None:
        says = "of a hybrid `seamark worker MODEL --explain gpu` says it where vLLM is installed"
        verdict = f"not to be told by the name {recipe.model}: an attention-only model hits by itself; {says}"
        return Outlook(None, verdict, notes=notes)
    unit = recipe.value("--prefix-match-unit") or str(family.unit)
    written = "inside the pass" if family.inside else "cut: a pass for each"
    verdict = f"will hit from request 2 on: {family.states}, states {written}, on multiples of {unit} tokens"
    if drafts:
        tokens = drafts.get("num_speculative_tokens", "")
        verdict += f"; beside its drafts ({_method(drafts)}{f', {tokens} tokens' if tokens else ''})"
        if recipe.environment.get("SEAMARK_DRAFTS") != "1":
            verdict += " once they have stood a trial, at each start"
    by = _vllm(recipe, version) or f"if vLLM is {SUPPORTED}, which does not show here"
    verdict += f"; by the model's name and {by}"
    if recipe.has_rust_frontend:
        notes.append("its HTTP server is the one in Rust: no middleware, reports are read at a port of their own")
    return Outlook(True, verdict, notes=notes)


def _obstacles(recipe: Recipe, family: KnownFamily | None, version: str) -> Iterator[tuple[str, str]]:
    """What keeps a recipe from hits, and what to change, the first to be changed first."""
    take = f"take vLLM {SUPPORTED}, for one the image {IMAGE}"
    of_fork = recipe.value("--load-format") == FORK or any(map(recipe.has, FORK_FLAGS))
    if of_fork or any(FORK in each.lower() for each in (recipe.image, *recipe.builds)):
        yield "its image holds a fork of vLLM, which the plugin leaves untouched", take
    if not _supported(version or tag_version(recipe.image)):
        yield f"{_vllm(recipe, version)} is left untouched by the plugin", take
    connector = str(recipe.fields(*CONNECTOR).get("kv_connector", ""))
    if family and connector in NOT_SERVED:
        yield f"vLLM serves no hybrid model with {connector}", "leave --kv-transfer-config away"
    drafts = recipe.fields(*DRAFTS)
    if not drafts or family is None:
        return
    away, method = f"leave {DRAFTS[0]} away", _method(drafts)
    if method and method not in METHODS:
        why = f"hints beside drafts of the method {method} are not known to be right"
        yield why, f"{away}, or take one of {', '.join(METHODS)}"
    if not family.beside_drafts and method != "ngram":
        yield f"{family.states}: hints are not used beside drafts", away
    for name in ("num_speculative_tokens_per_batch_size", "enable_adaptive_verification"):
        if drafts.get(name):
            yield "the number of its drafts is not fixed", f"leave {name} of {DRAFTS[0]} away"
    stages = recipe.value("--pipeline-parallel-size", "-pp") or "1"
    if not re.fullmatch(r"\d{1,9}", stages, re.ASCII):
        raise SettingsError(f"{recipe.source}: --pipeline-parallel-size {stages[:64]} is not a number")
    if int(stages) > 1:
        yield "drafts with pipeline parallelism", "take tensor parallelism, or no drafts"
    if connector:
        yield "drafts with a KV connector", f"leave {DRAFTS[0]} or {CONNECTOR[0]} away"


def _vllm(recipe: Recipe, version: str) -> str:
    """Which vLLM it runs, and what says so; empty: not to be told."""
    tagged = tag_version(recipe.image)
    return f"vLLM {version} (by its image's labels)" if version else tagged and f"vLLM {tagged} (by its image's tag)"


def _method(drafts: Mapping[str, object]) -> str:
    """vLLM has a name for the MTP of each family, and one for all."""
    method = str(drafts.get("method", ""))
    return "mtp" if method.endswith("_mtp") else method


def tag_version(image: str) -> str:
    """The version that an image of vLLM's own is tagged with; empty if its tag is none."""
    found = re.fullmatch(r"(?:.*/)?vllm-openai(?:-\w+)?:v(\d{1,6}\.\d{1,6}(?:\.\d{1,6})?).*", image)
    return found[1] if found else ""


def base_image(recipe: Recipe, version: str = "") -> str:
    """The image to put the plugin into in place of the recipe's, if that is vLLM's own and not one that it fits."""
    tagged = tag_version(recipe.image)
    return IMAGE if tagged and not _supported(version or tagged) else ""


def _supported(version: str) -> bool:
    found = re.match(r"(\d{1,6})\.(\d{1,6})", version)
    return found is None or FIRST <= (int(found[1]), int(found[2])) <= LAST
