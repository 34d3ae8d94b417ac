"""The doctor's cures, as the lines that somebody who runs vLLM in a certain way types or writes into a file."""

from __future__ import annotations

import json
import shlex
from string import Template
from typing import NamedTuple

from proxy.commands.families import TOOL_PARSERS
from proxy.commands.versions import IMAGE, RELEASE, is_fork, release_image
from proxy.commands.ways import FoundWay, Way

TOOL_FLAG = "--enable-auto-tool-choice"  # so named in vLLM's refusal
EVENTS_FLAG = "--middleware engine_patches.reporting.events_api.EventsEndpoint"

# What `seamark worker` sets and a recipe of spark-vllm-docker, which starts vLLM itself, has to say.
NEEDED = ("--enable-prefix-caching", "--enable-prompt-tokens-details", "--enable-scale-out", EVENTS_FLAG)

_SOURCE = "/path/to/seamark"
_BUILD = f"docker build -f {_SOURCE}/deploy/worker.Dockerfile --build-arg VLLM_IMAGE=IMAGE -t"
_PUSH = f"{_BUILD} REGISTRY/seamark-worker:1 {_SOURCE}\ndocker push REGISTRY/seamark-worker:1\n"
_MAKE_MOD = f"{_SOURCE}/deploy/spark-vllm-docker/make-mod.sh ~/spark-vllm-docker"


class WayCures(NamedTuple):
    """Lines for one way of running vLLM: $start is the model with host and port, $name what the way calls its vLLM.

    $image is vLLM's own that the plugin fits, $before the one it runs now, $python the interpreter that has vLLM.
    """

    install: str  # the plugin, and vLLM started with it
    update: str  # a plugin of the release $wanted or later
    flag: str  # where a flag of vLLM is written
    drafts: str  # hints with speculative decoding, without a trial
    release: str  # one line: the vLLM of `RELEASE`
    name: str = ""  # where it is not known


_CURES = {
    Way.PIP: WayCures(
        install=f"pip install --no-deps {_SOURCE}   # into the environment that runs vLLM; then start it with\n"
        "seamark worker $start ...   # the flags it has now in place of the dots",
        update=f"pip install --no-deps {_SOURCE}   # $wanted or later; then restart vLLM",
        flag="a flag of vLLM",
        drafts="SEAMARK_DRAFTS=1 seamark worker ...   # in vLLM's environment, the rest as it is",
        release=f"$python -m pip install vllm=={RELEASE}",
    ),
    Way.SYSTEMD: WayCures(
        name="UNIT",
        install=f"pip install --no-deps {_SOURCE}   # into the environment that runs vLLM, whose BIN this is:\n"
        "systemctl edit --full $name   # ExecStart=BIN/seamark worker $start FLAGS\n"
        "systemctl restart $name",
        update=f"pip install --no-deps {_SOURCE}   # $wanted or later; then systemctl restart $name",
        flag="at the end of ExecStart=, by systemctl edit --full $name",
        drafts="systemctl edit $name   # [Service] and below it Environment=SEAMARK_DRAFTS=1\nsystemctl restart $name",
        release=f"$python -m pip install vllm=={RELEASE} && systemctl restart $name",
    ),
    Way.DOCKER: WayCures(
        name="the container",
        install=f"{_BUILD} seamark-worker {_SOURCE}\n"
        "docker run OPTIONS seamark-worker $start FLAGS\n"
        "# IMAGE, OPTIONS and FLAGS: those $name has now; --port as within it",
        update=f"{_BUILD} seamark-worker {_SOURCE}\n"
        "# IMAGE: vLLM's own; Seamark $wanted or later. Then start the container again",
        flag="at the end of `docker run`",
        drafts="docker run -e SEAMARK_DRAFTS=1 ...   # the rest as $name has it now",
        release="docker run ... $image ...   # in place of $before",
    ),
    Way.COMPOSE: WayCures(
        name="SERVICE",
        install="services:                     # in compose.yaml; vLLM's `entrypoint:`, if $name has one, goes\n"
        "  $name:\n"
        "    image: seamark-worker\n"
        f"    build: {{context: {_SOURCE}, dockerfile: deploy/worker.Dockerfile, args: {{VLLM_IMAGE: IMAGE}}}}\n"
        "    command: $start FLAGS\n"
        "# IMAGE and vLLM's FLAGS: those it has now; --port as within the container\n"
        "docker compose up --build -d $name",
        update="docker compose up --build -d $name   # with Seamark $wanted or later",
        flag="in `command:` of the service $name, or in VLLM_ARGS of Seamark's .env",
        drafts="environment: {SEAMARK_DRAFTS: 1}   # of $name; in Seamark's own stack a line of .env\n"
        "docker compose up -d $name",
        release="image: $image   # of the service $name, in place of $before",
    ),
    Way.SPARK: WayCures(
        install=f"{_MAKE_MOD}\n"
        "mods: [mods/seamark]          # in your recipe, and behind `vllm serve` in its `command:`\n"
        f"{' '.join(NEEDED)}",
        update=f"{_MAKE_MOD}   # $wanted or later; then start the recipe again",
        flag="behind `vllm serve` in the recipe's `command:`",
        drafts="SEAMARK_DRAFTS=1 vllm serve ...      # in the recipe's `command:`, the rest as it is",
        release=f"cd ~/spark-vllm-docker && ./build-and-copy.sh --vllm-ref v{RELEASE} -t vllm-node-{RELEASE}   "
        f"# from source; -c: also to other Sparks. Then `container: vllm-node-{RELEASE}` in the recipe$fork",
    ),
    Way.KUBERNETES: WayCures(
        install=f"{_PUSH}"
        "# IMAGE: the one it runs now. In the container of its pod, without `command:`, then kubectl apply:\n"
        "image: REGISTRY/seamark-worker:1\n"
        "args: [$arguments, ...]   # vLLM's own flags in place of the dots",
        update=f"{_PUSH}# IMAGE: vLLM's own; Seamark $wanted or later. Then start the pods again",
        flag="in `args:` of vLLM's container, an entry for each word",
        drafts='env: [{name: SEAMARK_DRAFTS, value: "1"}]   # in vLLM\'s container, with what is there',
        release="image: $image   # in vLLM's container, in place of $before",
    ),
}


class Cures(NamedTuple):
    """What to change about the vLLM that serves `model` at `port`. Each cure is indented lines."""

    found: FoundWay
    model: str
    port: int
    local: bool  # asked over the loopback

    def install(self) -> str:
        host = [] if self.local and self.found.way in (Way.PIP, Way.SYSTEMD) else ["--host", "0.0.0.0"]  # noqa: S104
        words = [self.model, *host, "--port", str(self.port)]
        arguments = ", ".join(map(json.dumps, words))
        return self._lines(self._way.install, start=shlex.join(words), arguments=arguments)

    def update(self, wanted: str) -> str:
        return self._lines(self._way.update, wanted=wanted)

    def release(self) -> str:
        """A vLLM that the plugin knows."""
        return indented(release_line(self.found, "python3"))

    def flag(self, flag: str, without: str) -> str:
        """A flag of vLLM, and what is wrong without it."""
        return self._lines(f"$flag   # {self._way.flag}; $without", flag=flag, without=without)

    def tools(self) -> str:
        """Tools of agents, and the parser that reads this model's calls."""
        name = self.model.rpartition("/")[2].lower()
        parser = next((parser for family, parser in TOOL_PARSERS.items() if family in name), "NAME")
        flags = f"{TOOL_FLAG} --tool-call-parser {parser}"
        return self.flag(flags, "for agents; `vllm serve --help=tool` lists parsers")

    def drafts(self) -> str:
        unseen = "# without it, hints are tried at each start; with it, at once and unseen: `seamark gpu-check` first"
        return self._lines(f"{self._way.drafts}\n{unseen}")

    @property
    def _way(self) -> WayCures:
        return _CURES[self.found.way]

    def _lines(self, text: str, **words: str) -> str:
        return indented(Template(text).substitute(words, name=self.found.name or self._way.name))


def release_line(found: FoundWay, python: str) -> str:
    """How to take the vLLM of `RELEASE` in place of the one that is found; what is not to be typed is a comment."""
    words = {
        "image": release_image(found.image) or IMAGE,
        "before": found.image or "the one it has now",
        "python": python,
        "name": found.name or _CURES[found.way].name,
        "fork": ", and no --exp-b12x" if is_fork(found.image) else "",
    }
    own = found.way is Way.SPARK and release_image(found.image)
    return Template("container: $image   # in place of $before" if own else _CURES[found.way].release).substitute(words)


def indented(text: str) -> str:
    return "\n".join(f"    {line}" for line in text.splitlines())
