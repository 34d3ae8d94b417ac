"""What will hit, by a recipe's flags and its model's family alone: no model is loaded, and no vLLM is asked.

The plugin knows it better once an engine starts, and `seamark worker MODEL FLAGS --explain gpu` before that, where vLLM
is installed. What these tables say is what the plugin has, and what vLLM takes (tests/engine/unit/test_outlook.py).
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from proxy.commands import versions
from proxy.commands.cures import release_line
from proxy.commands.families import KnownFamily, family_of
from proxy.commands.recipe import Recipe, RecipeKind, flag_name
from proxy.commands.ways import FoundWay, Way, environment_version, image_version

# Methods of drafts with which the plugin gives hints.
METHODS = ("mtp", "ngram", "eagle", "eagle3", "dflash", "dspark")

# KV connectors with which vLLM starts no hybrid model.
NOT_SERVED = ("ExampleConnector", "FlexKVConnectorV1", "HF3FSKVConnector", "LMCacheConnectorV1", "LMCacheMPConnector")

# Fields of drafts with which their number is not fixed.
VARYING = ("num_speculative_tokens_per_batch_size", "enable_adaptive_verification")

DRAFTS, CONNECTOR = ("--speculative-config", "-sc"), ("--kv-transfer-config",)

# Flags that are taken away: they went, and nothing has to stand for them, but for the last. `SWITCHES` have no value.
DROPPED: Mapping[str, str] = {
    "--mamba-cache-mode": "vLLM keeps states where hits can be resumed by itself",
    "--swap-space": "vLLM computes again what has no room",
    "--device": "vLLM finds it",
    "--disable-log-requests": "vLLM logs none unless it is told to",
    "--enable-reasoning": "--reasoning-parser is enough",
    "--no-enable-prefix-caching": "without a prefix cache nothing can hit",
}

SWITCHES = ("--disable-log-requests", "--enable-reasoning", "--no-enable-prefix-caching")

# Flags that went, with which vLLM does not start; variables that went, which it overlooks; and the flag in their place.
REPLACED: Mapping[str, str] = {
    "--guided-decoding-backend": "--structured-outputs-config.backend",
    "--task": "--runner",
    "--rope-scaling": "--hf-overrides",
    "--cuda-graph-sizes": "--cudagraph-capture-sizes",
    "VLLM_ATTENTION_BACKEND": "--attention-backend",
    "VLLM_FLASH_ATTN_VERSION": "--attention-config.flash_attn_version",
    "VLLM_FLASHINFER_MOE_BACKEND": "--moe-backend",
    "VLLM_USE_FLASHINFER_MOE_FP4": "--moe-backend",
    "VLLM_MXFP4_USE_MARLIN": "--moe-backend",
    "VLLM_NVFP4_GEMM_BACKEND": "--linear-backend",
    "VLLM_ALL2ALL_BACKEND": "--all2all-backend",
}

SECRETS = ("--api-key", "--hf-token")

# What an image's vLLM needs to be asked without being built anew: the model's size, and the plugin.
_MOUNTS = "-v ~/.cache/huggingface:/root/.cache/huggingface -v /path/to/seamark:/seamark:ro -w /seamark"

_WAYS = {
    RecipeKind.SPARK: Way.SPARK,
    RecipeKind.LAUNCHER: Way.SPARK,
    RecipeKind.COMPOSE: Way.COMPOSE,
    RecipeKind.DOCKER: Way.DOCKER,
    RecipeKind.UNIT: Way.SYSTEMD,
}


class Outlook(NamedTuple):
    hits: bool | None  # None: not to be told from here
    verdict: str  # one sentence
    change: str = ""  # the one that hits wait for; empty: none
    ask: str = ""  # a command that says what does not show from here
    explain: str = ""  # a command that reckons what its cache holds, and whether vLLM will start; starts nothing
    image: str = ""  # of vLLM's own, to put the plugin into in place of the recipe's, which it does not fit
    starts: bool = True  # whether vLLM does, as the recipe is
    alone: bool = False  # whether vLLM hits without the plugin, which adds nothing
    notes: Sequence[str] = ()

    @property
    def lines(self) -> list[str]:
        """The verdict, the command that tells what it depends on, and what it waits for."""
        asks = [f"This tells it: {self.ask}"] if self.ask else []
        change = f"{'If it is another' if self.ask else 'The one change'}: {self.change}"
        return [self.verdict, *asks, *([change] if self.change else [])]


def outlook(recipe: Recipe, version: str = "") -> Outlook:
    """`version`: of the recipe's vLLM, as `version_of` tells it; without one an image's tag is believed."""
    notes = [*recipe.notes, *(f"{flag} is to go: {why}" for flag, why in DROPPED.items() if recipe.has(flag))]
    went = sorted(REPLACED.keys() & recipe.environment.keys())
    notes += [f"{name} has no effect on vLLM {versions.SUPPORTED}: {REPLACED[name]} is in its place" for name in went]
    if recipe.has_rust_frontend:
        notes.append("its HTTP server is the one in Rust: no middleware, reports are read at a port of their own")
    variables = {**os.environ, **recipe.environment}
    found = family_of(recipe.model, recipe.value("--download-dir"), variables, os.environ)
    if found.family and not found.family.states:
        verdict = f"will hit with vLLM alone: no layer of the model is recurrent, by {found.source}"
        return Outlook(True, f"{verdict}; the plugin adds nothing", alone=True, notes=notes)
    if obstacle := next(_obstacles(recipe, found.family, version), None):
        return obstacle._replace(notes=[*obstacle.notes, *notes])
    explain = _explaining(recipe)
    if found.family is None:
        ask = f"hf download {shlex.quote(recipe.model)} config.json   # then ask again: it is read where it lies"
        if recipe.model.startswith(("/", ".", "~")):
            ask = explain
        why = "its name is of no family known here, and no config.json that lies here tells it"
        return Outlook(None, f"not known for the model {recipe.model}: {why}", "", ask, explain, notes=notes)
    if known := _vllm(recipe, version):
        return Outlook(True, _hits(recipe, found.family, found.source, known), explain=explain, notes=notes)
    verdict = _hits(recipe, found.family, found.source)
    return Outlook(None, verdict, _release(recipe), _asking(recipe), explain, notes=notes)


def _hits(recipe: Recipe, family: KnownFamily, source: str, known: str = "") -> str:
    """What hits. `source`: what told the family; `known`: which vLLM it is, and what told that."""
    unit = recipe.value("--prefix-match-unit") or str(family.unit)
    written = "states are written inside the pass" if family.inside else "each state costs a forward pass"
    when = "" if known else f" if its vLLM is {versions.SUPPORTED}"
    verdict = f"will hit from request 2 on{when}: {family.states}, match unit {unit} tokens, {written}"
    if drafts := recipe.fields(*DRAFTS):
        told = " ".join(str(each) for each in (_method(drafts), drafts.get("num_speculative_tokens")) if each)
        verdict += f"; with its drafts{f' ({told})' if told else ''}"
        if recipe.environment.get("SEAMARK_DRAFTS") != "1":
            verdict += ", after a trial at each start"
    return f"{verdict}; by {' and '.join(filter(None, (source, known)))}"


def _obstacles(recipe: Recipe, family: KnownFamily | None, version: str) -> Iterator[Outlook]:
    """What keeps a recipe from hits, and what to change, the first to be changed first."""

    def obstacle(why: str, change: str, *, image: str = "", starts: bool = True) -> Outlook:
        return Outlook(False, f"no hits yet: {why}", change, image=image, starts=starts)

    if signs := versions.fork_signs((recipe.image, *recipe.builds), recipe.flags):
        unknown = [sign for sign in signs if sign.startswith("--") and sign not in recipe.builds]
        without = f" without {', '.join(unknown)}, which it does not know" if unknown else ""
        verdict = f"no hits by Seamark: {versions.FORK} ({', '.join(signs)})"
        yield Outlook(False, verdict, _release(recipe, without), notes=[versions.FORK_ALONE])
    if not versions.is_supported(version or versions.tag_version(recipe.image)):
        why = f"the plugin leaves {_vllm(recipe, version)} untouched; it knows {versions.SUPPORTED}"
        yield obstacle(why, _release(recipe), image=versions.release_image(recipe.image))
    for flag, instead in REPLACED.items():
        if recipe.has(flag):
            why = f"vLLM {versions.SUPPORTED} does not start with {flag}"
            yield obstacle(why, f"give {instead} in its place", starts=False)
    connector = str(recipe.fields(*CONNECTOR).get("kv_connector", ""))
    if family and connector in NOT_SERVED:
        why = f"vLLM serves no hybrid model with {connector}"
        yield obstacle(why, f"leave {CONNECTOR[0]} away", starts=False)
    drafts = recipe.fields(*DRAFTS)
    if not drafts or family is None:
        return
    away, method = f"leave {DRAFTS[0]} away", _method(drafts)
    if method and method not in METHODS:
        why = f"hints with drafts of the method {method} are not known to be right"
        yield obstacle(why, f"{away}, or take one of {', '.join(METHODS)}")
    if not family.with_drafts and method != "ngram":
        yield obstacle(f"{family.states}: hints are not used with drafts", away)
    if varying := [name for name in VARYING if drafts.get(name)]:
        yield obstacle("the number of its drafts is not fixed", f"leave {', '.join(varying)} of {DRAFTS[0]} away")
    if (stages := recipe.value("--pipeline-parallel-size", "-pp")) not in ("", "1"):
        yield obstacle(f"drafts with {stages} pipeline stages", "take tensor parallelism, or no drafts")
    if connector:
        yield obstacle("drafts with a KV connector", f"leave {DRAFTS[0]} or {CONNECTOR[0]} away")


def version_of(recipe: Recipe) -> str:
    """Of the recipe's vLLM, where that shows without running anything; else empty."""
    return image_version(recipe.image) if recipe.image else environment_version(recipe.python)


def _release(recipe: Recipe, without: str = "") -> str:
    """What to do for a vLLM that the plugin knows. `without`: flags."""
    way = _WAYS.get(recipe.kind, Way.PIP)
    found = FoundWay(Way.DOCKER if way is Way.SYSTEMD and recipe.image else way, recipe.name, recipe.image)
    return f"take vLLM {versions.RELEASE}{without}: {release_line(found, recipe.python)}"


def _asking(recipe: Recipe) -> str:
    """A command that says which vLLM a recipe runs."""
    return f"{_python(recipe)} -c 'import vllm; print(vllm.__version__)'"


def _explaining(recipe: Recipe) -> str:
    """`seamark worker --explain gpu` with the recipe's own flags, without those that go or hold secrets."""
    words, kept = iter(recipe.arguments), list[str]()
    for word in words:
        if (name := flag_name(word)) not in (*DROPPED, *SECRETS):
            kept.append(word)
        elif "=" not in word and name not in SWITCHES:
            next(words, "")  # its value
    command = shlex.join(["-m", "engine_patches", "worker", *kept, "--explain", "gpu"])
    there = "" if _image(recipe) else "   # with Seamark's plugin there"
    return f"{_python(recipe, f' --gpus all {_MOUNTS}')} {command}{there}"


def _python(recipe: Recipe, options: str = "") -> str:
    """The Python that has a recipe's vLLM; `options`: for its image."""
    image = _image(recipe)
    return f"{recipe.program} run --rm{options} --entrypoint python3 {shlex.quote(image)}" if image else recipe.python


def _image(recipe: Recipe) -> str:
    return recipe.image or ("vllm-node" if recipe.kind is RecipeKind.LAUNCHER else "")


def _vllm(recipe: Recipe, version: str) -> str:
    """Which vLLM it runs, and what says so; empty: not to be told."""
    tagged, by = versions.tag_version(recipe.image), "image" if recipe.image else "environment"
    told = f"{version} (by its {by})" if version else tagged and f"{tagged} (by its image's tag)"
    return told and f"vLLM {told}"


def _method(drafts: Mapping[str, object]) -> str:
    """vLLM has a name for the MTP of each family, and one for all."""
    method = str(drafts.get("method", ""))
    return "mtp" if method.endswith("_mtp") else method
