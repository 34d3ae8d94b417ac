"""The doctor's cures are lines for the way in which vLLM is run, and name what is known of it."""

from __future__ import annotations

import pytest

from proxy.commands.cures import EVENTS_FLAG, NEEDED, TOOL_PARSERS, Cures
from proxy.commands.ways import FoundWay, Way

OPEN = "--host 0.0.0.0 "


def cures(way: Way, name: str = "", model: str = "org/m", port: int = 8001, local: bool = True) -> Cures:
    return Cures(FoundWay(way, name), model, port, local)


# For each way: what its cures have and no other way's, without a name and with one.
INSTALL = {
    Way.PIP: ("seamark worker org/m --port 8001 ...", "pip install --no-deps"),
    Way.SYSTEMD: (
        "systemctl edit --full UNIT   # ExecStart=BIN/seamark worker org/m --port 8001 FLAGS",
        "restart UNIT",
    ),
    Way.DOCKER: (f"docker run OPTIONS seamark-worker org/m {OPEN}--port 8001 FLAGS", "those the container has now"),
    Way.COMPOSE: (f"    command: org/m {OPEN}--port 8001 FLAGS", "docker compose up --build -d SERVICE"),
    Way.SPARK: ("make-mod.sh ~/spark-vllm-docker", "mods: [mods/seamark]", " ".join(NEEDED)),
    Way.KUBERNETES: ('args: ["org/m", "--host", "0.0.0.0", "--port", "8001", ...]', "docker push REGISTRY/"),
}

FLAG = {
    Way.PIP: "# a flag of vLLM; why",
    Way.SYSTEMD: "ExecStart=, by systemctl edit --full UNIT; why",
    Way.DOCKER: "at the end of `docker run`; why",
    Way.COMPOSE: "of the service that runs vLLM, or in VLLM_ARGS",
    Way.SPARK: "in the recipe's `command:`; why",
    Way.KUBERNETES: "in `args:` of vLLM's container",
}

UPDATE = {
    Way.PIP: "pip install --no-deps /path/to/seamark   # 0.3 or later; then restart vLLM",
    Way.SYSTEMD: "# 0.3 or later; then systemctl restart UNIT",
    Way.DOCKER: "Seamark 0.3 or later. Then start the container again",
    Way.COMPOSE: "docker compose up --build -d SERVICE   # with Seamark 0.3 or later",
    Way.SPARK: "make-mod.sh ~/spark-vllm-docker   # 0.3 or later; then start the recipe again",
    Way.KUBERNETES: "Seamark 0.3 or later. Then start the pods again",
}

DRAFTS = {
    Way.PIP: "    SEAMARK_DRAFTS=1 seamark worker ...",
    Way.SYSTEMD: "systemctl edit UNIT   # [Service] and below it Environment=SEAMARK_DRAFTS=1",
    Way.DOCKER: "docker run -e SEAMARK_DRAFTS=1 ...   # the rest as its container has it now",
    Way.COMPOSE: "environment: {SEAMARK_DRAFTS: 1}   # of SERVICE;",
    Way.SPARK: "SEAMARK_DRAFTS=1 vllm serve ...",
    Way.KUBERNETES: 'env: [{name: SEAMARK_DRAFTS, value: "1"}]',
}


@pytest.mark.parametrize("way", list(Way))
def test_each_way_has_lines_of_its_own(way):
    own = cures(way)
    assert all(words in own.install() for words in INSTALL[way]), own.install()
    for marks, text in ((FLAG, own.flag("--x", "why")), (UPDATE, own.update("0.3")), (DRAFTS, own.drafts())):
        assert [each for each in Way if marks[each] in text] == [way], text
    assert own.flag("--x", "why").startswith("    --x   # ") and own.flag("--x", "why").endswith("; why")
    for other in Way:
        if other is not way:
            assert INSTALL[other][0] not in own.install()


@pytest.mark.parametrize("way", list(Way))
def test_each_line_of_a_cure_is_indented(way):
    own = cures(way)
    for text in (own.install(), own.update("1"), own.flag("--x", ""), own.drafts(), own.tools(), own.trial()):
        assert all(line.startswith("    ") for line in text.splitlines())


@pytest.mark.parametrize(
    ("model", "parser"),
    [*((f"org/{family.upper()}-7B", parser) for family, parser in TOOL_PARSERS.items()), ("qwen3-next/mine", "NAME")],
)
def test_a_parser_of_tools_is_told_by_the_models_name(model, parser):
    assert f"--enable-auto-tool-choice --tool-call-parser {parser}   # " in cures(Way.PIP, model=model).tools()


def test_the_trial_and_what_follows_it_are_named():
    assert "seamark serve --worker http://127.0.0.1:8001 " in cures(Way.PIP).trial()
    assert "/seamark/self-check/reset" in cures(Way.PIP).closed() and "--speculative-config" in cures(Way.PIP).closed()


def test_what_is_needed_ends_with_the_reports():
    assert NEEDED[-1] == EVENTS_FLAG and len(set(NEEDED)) == len(NEEDED)
