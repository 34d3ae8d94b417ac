"""The doctor's cures, as the lines that somebody who runs vLLM in a certain way types or writes into a file."""

from __future__ import annotations

from string import Template
from typing import NamedTuple

from proxy.commands.versions import IMAGE, RELEASE, is_fork, release_image
from proxy.commands.ways import FoundWay, Way

TOOL_FLAG = "--enable-auto-tool-choice"  # so named in vLLM's refusal
EVENTS_FLAG = "--middleware engine_patches.reporting.events_api.EventsEndpoint"

# What `seamark worker` sets and a recipe of spark-vllm-docker, which starts vLLM itself, has to say.
NEEDED = ("--enable-prefix-caching", "--enable-prompt-tokens-details", "--enable-scale-out", EVENTS_FLAG)

_SOURCE = "/path/to/seamark"
_PIP = f"pip install --no-deps {_SOURCE}"


class WayCures(NamedTuple):
    """Lines for one way of running vLLM: $name is what the way calls it, $python the interpreter that has it.

    $image is vLLM's own that the plugin fits, $before the one it runs now.
    """

    install: str  # the plugin, and vLLM started with it
    flag: str  # where a flag of vLLM is written
    release: str  # one line: the vLLM of `RELEASE`


_CURES = {
    Way.PIP: WayCures(
        f"{_PIP}   # into the environment that runs vLLM; then start it with\n"
        "seamark worker --host 0.0.0.0 ...   # in place of `vllm serve`; what stands behind that in place of the dots",
        "a flag of vLLM",
        f"$python -m pip install vllm=={RELEASE}",
    ),
    Way.SYSTEMD: WayCures(
        'seamark setup "$$(systemctl show --property=FragmentPath --value $name)"   # then the run.sh that it writes',
        "at the end of ExecStart=, by systemctl edit --full $name",
        f"$python -m pip install vllm=={RELEASE} && systemctl restart $name",
    ),
    Way.DOCKER: WayCures(
        "seamark setup $name   # then the run.sh that it writes",
        "at the end of `docker run`",
        "docker run ... $image ...   # in place of $before",
    ),
    Way.COMPOSE: WayCures(
        "seamark setup compose.yaml   # the file of the service $name; then the run.sh that it writes",
        "in `command:` of the service $name, or in VLLM_ARGS of Seamark's .env",
        "image: $image   # of the service $name, in place of $before",
    ),
    Way.SPARK: WayCures(
        "seamark setup RECIPE   # its file in spark-vllm-docker; then the run.sh that it writes",
        "behind `vllm serve` in the recipe's `command:`",
        f"cd ~/spark-vllm-docker && ./build-and-copy.sh --vllm-ref v{RELEASE} -t vllm-node-{RELEASE}   "
        f"# from source; -c: also to other Sparks. Then `container: vllm-node-{RELEASE}` in the recipe$fork",
    ),
    Way.KUBERNETES: WayCures(
        f"docker build -f {_SOURCE}/deploy/worker.Dockerfile --build-arg VLLM_IMAGE=IMAGE -t REGISTRY/seamark-worker:1 "
        f"{_SOURCE}   # IMAGE: the one it runs now\n"
        "docker push REGISTRY/seamark-worker:1\n"
        "image: REGISTRY/seamark-worker:1   # of vLLM's container, without `command:`, and with its `args:`",
        "in `args:` of vLLM's container, an entry for each word",
        "image: $image   # in vLLM's container, in place of $before",
    ),
}


class Cures(NamedTuple):
    found: FoundWay

    def install(self) -> str:
        return self._lines(_CURES[self.found.way].install)

    def update(self, wanted: str) -> str:
        return f"{_PIP}   # {wanted} or later, into vLLM's environment, or build its image anew; then restart vLLM"

    def flag(self, flag: str, without: str) -> str:
        """A flag of vLLM, and what is wrong without it."""
        return self._lines(f"$flag   # {_CURES[self.found.way].flag}; $without", flag=flag, without=without)

    def tools(self) -> str:
        return self.flag(f"{TOOL_FLAG} --tool-call-parser NAME", "for agents; `vllm serve --help=tool` lists names")

    def _lines(self, text: str, **words: str) -> str:
        return Template(text).substitute(words, name=self.found.name or "NAME")


def release_line(found: FoundWay, python: str) -> str:
    """How to take the vLLM of `RELEASE` in place of the one that is found; what is not to be typed is a comment."""
    own = release_image(found.image)
    is_their_recipe = found.way is Way.SPARK and own
    text = "container: $image   # in place of $before" if is_their_recipe else _CURES[found.way].release
    return Template(text).substitute(
        image=own or IMAGE,
        before=found.image or "the one it has now",
        python=python,
        name=found.name or "NAME",
        fork=", and no --exp-b12x" if is_fork(found.image) else "",
    )
