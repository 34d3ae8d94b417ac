"""The doctor's cures, as the lines that somebody who runs vLLM in a certain way types or writes into a file."""

from __future__ import annotations

import json
import shlex
from typing import NamedTuple

from proxy.commands.ways import FoundWay, Way

SOURCE = "/path/to/seamark"

TOOL_FLAG = "--enable-auto-tool-choice"  # so named in vLLM's refusal

EVENTS_FLAG = "--middleware engine_patches.reporting.events_api.EventsEndpoint"

# What `seamark worker` sets and a recipe of spark-vllm-docker, which starts vLLM itself, has to say.
NEEDED = ("--enable-prefix-caching", "--enable-prompt-tokens-details", "--enable-scale-out", EVENTS_FLAG)

# By a part of a model's name.
TOOL_PARSERS = {
    "qwen3-next": "hermes",
    "qwen3-coder": "qwen3_xml",
    "qwen3.": "qwen3_xml",
    "nemotron-3": "qwen3_xml",
    "glm-5.3": "glm47",
    "granite-4": "granite4",
    "lfm2": "lfm2",
}

REGISTRY_IMAGE = "REGISTRY/seamark-worker:1"


class Cures(NamedTuple):
    """What to change about the vLLM that serves `model` at `port`. Each cure is indented lines."""

    found: FoundWay
    model: str
    port: int
    local: bool  # asked over the loopback

    def install(self) -> str:
        """The plugin, and vLLM started with it."""
        way, name = self.found
        open_host = "" if self.local and way in (Way.PIP, Way.SYSTEMD) else " --host 0.0.0.0"
        start = f"{shlex.quote(self.model)}{open_host} --port {self.port}"
        if way is Way.COMPOSE:
            service = name or "SERVICE"
            return _indented(
                f"services:                     # in compose.yaml; vLLM's `entrypoint:`, if {service} has one, goes",
                f"  {service}:",
                "    image: seamark-worker",
                f"    build: {{context: {SOURCE}, dockerfile: deploy/worker.Dockerfile, args: {{VLLM_IMAGE: IMAGE}}}}",
                f"    command: {start} FLAGS",
                "# IMAGE and vLLM's FLAGS: those it has now; --port as within the container",
                f"docker compose up --build -d {service}",
            )
        if way is Way.DOCKER:
            return _indented(
                _build("seamark-worker"),
                f"docker run OPTIONS seamark-worker {start} FLAGS",
                f"# IMAGE, OPTIONS and FLAGS: those {name or 'the container'} has now; --port as within it",
            )
        if way is Way.SPARK:
            return _indented(
                f"{SOURCE}/deploy/spark-vllm-docker/make-mod.sh ~/spark-vllm-docker",
                "mods: [mods/seamark]          # in your recipe, and behind `vllm serve` in its `command:`",
                " ".join(NEEDED),
            )
        if way is Way.KUBERNETES:
            arguments = ", ".join(map(json.dumps, shlex.split(start)))
            return _indented(
                _build(REGISTRY_IMAGE),
                f"docker push {REGISTRY_IMAGE}",
                "# IMAGE: the one it runs now. In the container of its pod, without `command:`, then kubectl apply:",
                f"image: {REGISTRY_IMAGE}",
                f"args: [{arguments}, ...]   # vLLM's own flags in place of the dots",
            )
        if way is Way.SYSTEMD:
            unit = name or "UNIT"
            return _indented(
                f"pip install --no-deps {SOURCE}   # into the environment that runs vLLM, whose BIN this is:",
                f"systemctl edit --full {unit}   # ExecStart=BIN/seamark worker {start} FLAGS",
                f"systemctl restart {unit}",
            )
        return _indented(
            f"pip install --no-deps {SOURCE}   # into the environment that runs vLLM; then start it with",
            f"seamark worker {start} ...   # the flags it has now in place of the dots",
        )

    def update(self, wanted: str) -> str:
        """A plugin of the release `wanted` or later."""
        way, name = self.found
        image = f"# IMAGE: vLLM's own; Seamark {wanted} or later."
        if way is Way.DOCKER:
            return _indented(_build("seamark-worker"), f"{image} Then start the container again")
        if way is Way.KUBERNETES:
            return _indented(
                _build(REGISTRY_IMAGE), f"docker push {REGISTRY_IMAGE}", f"{image} Then start the pods again"
            )
        if way is Way.COMPOSE:
            return _indented(f"docker compose up --build -d {name or 'SERVICE'}   # with Seamark {wanted} or later")
        if way is Way.SPARK:
            return _indented(
                f"{SOURCE}/deploy/spark-vllm-docker/make-mod.sh ~/spark-vllm-docker   # {wanted} or later; "
                "then start the recipe again"
            )
        then = f"systemctl restart {name or 'UNIT'}" if way is Way.SYSTEMD else "restart vLLM"
        return _indented(f"pip install --no-deps {SOURCE}   # {wanted} or later; then {then}")

    def flag(self, flag: str, without: str) -> str:
        """A flag of vLLM, and what is wrong without it."""
        way, name = self.found
        if way is Way.COMPOSE:
            where = f"in `command:` of the service {name or 'that runs vLLM'}, or in VLLM_ARGS of Seamark's .env"
        elif way is Way.DOCKER:
            where = "at the end of `docker run`"
        elif way is Way.SPARK:
            where = "behind `vllm serve` in the recipe's `command:`"
        elif way is Way.KUBERNETES:
            where = "in `args:` of vLLM's container, an entry for each word"
        elif way is Way.SYSTEMD:
            where = f"at the end of ExecStart=, by systemctl edit --full {name or 'UNIT'}"
        else:
            where = "a flag of vLLM"
        return _indented(f"{flag}   # {where}; {without}")

    def tools(self) -> str:
        """Tools of agents, and the parser that reads this model's calls."""
        name = self.model.rpartition("/")[2].lower()
        parser = next((parser for family, parser in TOOL_PARSERS.items() if family in name), "NAME")
        flags = f"{TOOL_FLAG} --tool-call-parser {parser}"
        return self.flag(flags, "for agents; `vllm serve --help=tool` lists parsers")

    def trial(self) -> str:
        """What ends a trial of hints beside speculative decoding."""
        return _indented("# the engine tries them itself: a minute without requests, or ten and some beside them")

    def closed(self) -> str:
        """What to do about hints that were closed beside speculative decoding."""
        return _indented(
            "# vLLM's log has the figures. A restart of the worker tries again;",
            "# or no --speculative-config; or as it is: vLLM alone caches",
        )

    def drafts(self) -> str:
        """Hints beside speculative decoding, without a trial."""
        way, name = self.found
        if way is Way.COMPOSE:
            service = name or "SERVICE"
            lines = [
                f"environment: {{SEAMARK_DRAFTS: 1}}   # of {service}; in Seamark's own stack a line of .env",
                f"docker compose up -d {service}",
            ]
        elif way is Way.DOCKER:
            lines = [f"docker run -e SEAMARK_DRAFTS=1 ...   # the rest as {name or 'its container'} has it now"]
        elif way is Way.SPARK:
            lines = ["SEAMARK_DRAFTS=1 vllm serve ...      # in the recipe's `command:`, the rest as it is"]
        elif way is Way.KUBERNETES:
            lines = ['env: [{name: SEAMARK_DRAFTS, value: "1"}]   # in vLLM\'s container, beside what is there']
        elif way is Way.SYSTEMD:
            unit = name or "UNIT"
            lines = [
                f"systemctl edit {unit}   # [Service] and below it Environment=SEAMARK_DRAFTS=1",
                f"systemctl restart {unit}",
            ]
        else:
            lines = ["SEAMARK_DRAFTS=1 seamark worker ...   # in vLLM's environment, the rest as it is"]
        return _indented(
            *lines,
            "# without it, hints are tried at each start; with it, at once and unseen: `seamark gpu-check` first",
        )


def _build(image: str) -> str:
    return f"docker build -f {SOURCE}/deploy/worker.Dockerfile --build-arg VLLM_IMAGE=IMAGE -t {image} {SOURCE}"


def _indented(*lines: str) -> str:
    return "\n".join(f"    {line}" for line in lines)
