"""How vLLM is run, read from a line, a script, a file or Docker (`golden/recipe.txt`), and what is said of it."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from proxy.commands.outlook import Outlook, outlook
from proxy.commands.recipe import EVERYWHERE, Recipe, RecipeKind
from proxy.commands.recipe_reader import read_recipe
from proxy.commands.recipe_text import words_of
from proxy.errors import SettingsError

CONTAINER: Mapping[str, Any] = {
    "Name": "/llm",
    "Config": {
        "Image": "vllm/vllm-openai:v0.33.0",
        "Entrypoint": ["vllm", "serve"],
        "Cmd": ["org/m", "--port", "8001"],
        "Env": ["PATH=/bin", "A=b=c", "EMPTY="],
        "Labels": {},
    },
    "HostConfig": {"PortBindings": {"8001/tcp": [{"HostIp": "10.0.0.7", "HostPort": "9001"}]}, "NetworkMode": "bridge"},
}


SPARK = {"name": "x", "container": "vllm-node", "command": "vllm serve m --port {port} {{x}}\n# end"}
SPARK |= {"defaults": {"port": 8007}, "env": {"A_B": 1, "C": None}, "build_args": ["--a", 1]}


def compose(**service: Any) -> dict[str, Any]:
    usual = {"image": "vllm/vllm-openai:v0.33.0", "command": "m --port 8001"}
    return {"services": {"db": {"image": "redis"}, "llm": {**usual, **service}}}


# Lines, and files by their names: as text or YAML.
READ: dict[str, Any] = {
    "a line": "A=1 B='2' vllm serve ${UNSET:-m} --port $PORT_HERE --host ${UNSET} # for now",
    "an old command": "/venv/bin/python3 -m vllm.entrypoints.openai.api_server --model=m --port 80 --port 81",
    "a comment before": "# vllm serve old\n  # docker run i\nvllm serve m --max_model_len=5 --a=1=2 --b",
    "variables of the script": "MODEL='org/my m'\nOTHER=\nvllm serve $MODEL ${OTHER:-x} $LATER; LATER=x",
    "a quote left open": "A='open\nvllm serve $MODEL_HERE",
    "Rust": "VLLM_USE_RUST_FRONTEND=' 1 ' vllm serve m --model n",
    "no Rust": "VLLM_USE_RUST_FRONTEND=0 vllm serve --model n",
    "the launcher": "./launch-cluster.sh -t x exec vllm serve m",
    "no launcher, above": "./launch-cluster.sh stop\n\nvllm serve m",
    "docker": "TAG=v1\nMODEL=org/m\ndocker run -e A=$MODEL --env=B=b -e C i:$TAG bash -c 'vllm serve $MODEL --x' # y\n",
    "podman, many options": "sudo podman container run --rm -it -dp 9000:8000 -v /a:/b --name=x i m --port 8000",
    "docker, entrypoint": "docker run --entrypoint vllm --publish=10.0.0.7:9000:8001 i serve m --port=8001",
    "docker, another port": "docker run -p 9000:8001 i m",
    "docker, several ports": "docker run -p 9001:1 -p9000:8000 i m",
    "docker, host": "docker run --network host -p 9000:8000 i m",
    "docker, a shell": "docker run i bash -c \"ulimit -l 1; exec vllm serve m --a 'b c' | tee x\"",
    **{
        f"fields {flags}": f"vllm serve m {flags}"
        for flags in (
            *("""--sc '{"method": "mtp", "n": 2}'""", """-sc '{"n": 1}' --sc.method mtp""", "-sc.method mtp --sc.n=2"),
            *("--sc.method", "--sc '[1]'", "--scx.method mtp", """-sc '{"n": 1}' --sc '{"n": 2}' -sc '{"n": 3}'"""),
        )
    },
    "spark.yaml": SPARK,
    "plain.yaml": {"name": "x", "container": "vllm-node", "command": "vllm serve m"},
    "config.yaml": {"model": "org/m", "port": 8002, "host": "::", "max_model_len": 8, "speculative-config": {"n": 1}},
    "compose.yaml": compose(ports=["9000:8001", "9002:8001"], environment={"A": 1}),
    "compose-host.yaml": compose(network_mode="host", ports=["9000:8001"]),
    "compose-shell.yml": compose(image="mine:1", command="bash -c 'exec vllm serve m'"),
    "compose-entry.yaml": compose(image="mine:1", entrypoint="vllm serve", command=["m"]),
    "compose-variables.yaml": compose(
        image="${THERE}/vllm:1",
        entrypoint=["vllm", "serve"],
        command=["$PORT_HERE", "--a", "${COMMENT:-none}"],
        environment=["A=$THERE", "B"],
    ),
}


def read(given: str | Path) -> Recipe:
    return read_recipe(str(given), lambda name: None)


@pytest.fixture
def file(tmp_path: Path) -> Callable[[str, Any], Path]:
    """`file(name, what)`: a file with a text, or with something as YAML."""

    def file(name: str, what: Any) -> Path:
        path = tmp_path / name
        path.write_text(what if isinstance(what, str) else yaml.safe_dump(what))
        return path

    return file


def shown(recipe: Recipe) -> str:
    """All that is read, and what follows from it."""
    own = [f"{each.name}: {getattr(recipe, each.name)!r}" for each in fields(recipe) if each.name != "text"]
    found = {name: getattr(recipe, name) for name in ("model", "host", "port", "has_rust_frontend")}
    found |= {f"flag {flag}": recipe.value(flag) for flag in ("--a", "--max-model-len") if recipe.has(flag)}
    found |= {"fields": fields_given} if (fields_given := recipe.fields("--sc", "-sc")) else {}
    return "\n".join([*own, *(f"-> {name}: {value!r}" for name, value in found.items())])


@pytest.mark.parametrize("case", READ)
def test_how_vllm_is_run_is_read_whole(case, file, monkeypatch, tmp_path, expect_golden):
    for name, value in {"PORT_HERE": "8005", "TAG": "theirs", "MODEL": "theirs", "HOME": str(tmp_path)}.items():
        monkeypatch.setenv(name, value)
    file(".env", "PORT_HERE=file\n  THERE = \nTHERE='there'\n#COMMENT=x\nno assignment\n")
    given = READ[case] if "." not in case else f"~/{file(case, READ[case]).name}"
    expect_golden("recipe", case, shown(read(given)), FOLDER=tmp_path)


ENDS = [
    "",
    "\nb",
    "\r\nb",
    "; b",
    *(f" {stop} b" for stop in ("#", ";", "&", "&&", "|", "<", ">", "2>&1", "0<b", "(", ")")),
]


@given(
    st.lists(st.text("ab '\"\\$`#;{2é\n", max_size=5)),
    st.sampled_from([" ", "\t", " \\\n  ", " \\\r\n"]),
    st.sampled_from(ENDS),
)
def test_words_are_those_of_a_shell_up_to_the_end_of_its_command(words, space, end):
    spelt = space.join(map(shlex.quote, words))
    line = words_of(f"vllm serve {spelt}{end}", 11, "a line")
    assert [word.value for word in line.words] == words
    assert "".join(word.raw for word in line.words) == "".join(map(shlex.quote, words))
    assert f"vllm serve {spelt}{end}"[line.end :] == end if words else not line.words


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a'b'c'' '' d", ["abc", "", "d"]),
        (r'"a \"b\" \$c \\ \` \x"', [r'a "b" $c \ ` \x']),
        ('"a\\\nb"', ["a\nb"]),
        (r"a\ b \'c a#b", ["a b", "'c", "a#b"]),
        ("a \\", ["a", ""]),
        ("a b>c", ["a", "b"]),
        ("${A:-b c}d $(e f) $G", ["${A:-b c}d", "$(e f)", "$G"]),
        ("--a='{\"b\": 1}' c", ['--a={"b": 1}', "c"]),
    ],
)
def test_a_word_may_be_spelt_in_several_ways(text, words):
    assert [word.value for word in words_of(text, 0, "").words] == words


@pytest.mark.parametrize("end", ["'x", '"x', '"x\\"', '"x\\', "${x", "$(x", "y'x"])
def test_a_quote_that_is_not_closed_is_said_with_where_it_begins(end):
    with pytest.raises(SettingsError) as error:
        words_of(f"a {end}", 0, "run.sh")
    assert str(error.value) == f"run.sh: a quote behind `{end}` is not closed"
    with pytest.raises(SettingsError, match="behind `" + "'" + "x" * 29 + "` is"):
        words_of("a '" + "x" * 100, 0, "")


def test_fields_that_are_no_json_and_a_port_that_is_none_are_said_with_the_flag():
    with pytest.raises(SettingsError, match=r"a line: --sc is no JSON: \{$"):
        Recipe(RecipeKind.COMMAND, "a line", "", ("-sc", "{")).fields("--sc", "-sc")
    for port in ("9" * 5000, "65536", "0", "-1", "8000-8010", "٣٣", "080000"):
        with pytest.raises(SettingsError, match=f"the command: --port {port[:64]} is no port"):
            _ = read(f"vllm serve m --port {port}").port


ITS = "name: x\ncontainer: c\ncommand: vllm serve m\n"

# Five hundred bytes that stand for ten to the ninth values.
BOMB = "a: &a [x]\n" + "".join(f"{b}: &{b} [{f'*{a},' * 10}]\n" for a, b in zip("abcdefghi", "bcdefghij", strict=True))


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        *(
            ("a.yaml", f"model: m\n{text}", "its values are too many")
            for text in (BOMB, "a: &a [*a]", "a: " + "[" * 500)
        ),
        *(
            ("a.yaml", f"model: m\na: {odd}", "cannot be read as YAML")
            for odd in ('"\\ud800"', "2026-13-01", "9" * 5000)
        ),
        *(
            ("a.yaml", f"{ITS}{name}: 5\n", f"`{name}:` has to be ")
            for name in ("defaults", "env", "build_args", "mods")
        ),
        *(
            ("a.yaml", f"services: {{a: {{image: vllm, command: m, {name}: 5}}}}", f"a: `{name}:` has to be ")
            for name in ("environment", "ports")
        ),
        ("a.yaml", "model: [m]", "`model:` has to be a text"),
        (
            "a.yaml",
            f"{ITS}  --port {{port:>2000000000}}\ndefaults: {{port: 1}}\n",
            "is no template: {port:>2000000000}",
        ),
        ("a.sh", "vllm serve " + "m" * 2**17, "more than 131,072 bytes"),
        ("a.sh", f"V={'x' * 50_000}\nvllm serve {'$V ' * 21}", "more than 1,048,576 characters"),
        ("a.yaml", "name: x\ncontainer: c\ncommand: vllm serve m --port {port}\n", "wants {port}, which `defaults:`"),
        ("a.yaml", "command: 1\n", "has a text for name, container, command"),
        ("a.yaml", "name: x\ncontainer: c\ncommand: vllm serve {}\n", "`command:` is no template"),
        ("a.yaml", "name: x\ncontainer: c\ncommand: sleep 1\n", "no `vllm serve` in it"),
        ("a.yaml", "a: 1\nb: [\nc: d: e", "is no YAML: line 3"),
        ("a.yaml", "a: 1", "has no `command:`"),
        ("a.yml", "[a]", "says nothing of how vLLM is run"),
        *(
            ("a.yaml", f"services: {odd}", "no service that runs vLLM")
            for odd in (
                "{a: {image: redis}}",
                "{a: {image: redis, command: vllm}}",
                "{a: {image: vllm/vllm-openai}}",
                "",
            )
        ),
        (
            "a.yaml",
            "services: {a: {image: vllm/vllm-openai, command: m}, b: {image: vllm/vllm-openai, command: m}}",
            "2 services with vLLM (a, b)",
        ),
        ("a.yaml", "services: {a: {build: ., command: vllm serve m}}", "the service a has no `image:`"),
        ("a.sh", "vllm serve a\nvllm serve b\n", "more than one `vllm serve`"),
        ("a.sh", "echo\n", "no `vllm serve`"),
        ("a.sh", "docker run --rm\n", "names no image"),
        ("a.sh", "docker run a\ndocker run b", "more than one `docker run`"),
        ("a.sh", "my-vllm serve m; vllm server m; vllm bench serve m", "no `vllm serve`"),
    ],
)
def test_a_file_that_cannot_be_read_is_refused_with_what_is_missing(name, text, said, file):
    path = file(name, text)
    with pytest.raises(SettingsError) as error:
        read(path)
    assert said in str(error.value) and str(path) in str(error.value)


def test_what_is_no_file_no_command_and_no_container_is_refused(tmp_path):
    asked: list[str] = []
    for each in ("qwen36", "no/where.yaml", "-x", "a b", "x/" + "a" * 5000):
        with pytest.raises(SettingsError, match="is no file, no command with `vllm serve`, and no container"):
            read_recipe(each, asked.append)
    assert asked == ["qwen36"]  # Docker is asked for what may be a name
    with pytest.raises(SettingsError, match="is a folder"):
        read(tmp_path)
    binary = tmp_path / "binary"
    binary.write_bytes(b"\xff\xfe")
    with pytest.raises(SettingsError, match="is no text in UTF-8"):
        read(binary)


@pytest.mark.parametrize(
    ("port", "listens"),
    [
        *((port, (EVERYWHERE, 9000)) for port in ("9000:8001", "9000:8001/tcp", {"target": 8001, "published": 9000})),
        *((f"{host}:9000:8001", ("10.0.0.7", 9000)) for host in ("10.0.0.7", "${ADDRESS_HERE:-10.0.0.7}")),
        *(("[::1]:9000:8001", ("::1", 9000)), ({"target": "8001", "published": "1", "host_ip": "a"}, ("a", 1))),
        *((port, ("127.0.0.1", 8001)) for port in ({"target": 8001}, {"target": 80, "published": 9000}, "8001", 8001)),
        *((port, ("127.0.0.1", 8001)) for port in ("9000:8000", "9000-9005:8001")),
    ],
)
def test_a_port_of_compose_leads_to_that_of_vllm_or_counts_for_nothing(port, listens, file):
    recipe = read(file("a.yaml", compose(ports=["53:53/udp", port])))
    assert ((recipe.host, recipe.port), recipe.name) == (listens, "llm")


def contained(config: Mapping[str, Any] | None = None, **host: Any) -> Recipe:
    told = {**CONTAINER, "Config": {**CONTAINER["Config"], **(config or {})}}
    told["HostConfig"] = {**CONTAINER["HostConfig"], **host}
    return read_recipe("llm", lambda name: told if name == "llm" else None)


@pytest.mark.parametrize(
    ("host", "listens"),
    [
        ({"NetworkMode": "host"}, None),
        ({"PortBindings": {"8001/tcp": [{"HostIp": "", "HostPort": "9001"}]}}, (EVERYWHERE, 9001)),
        ({"PortBindings": {"8001/tcp": [{"HostPort": ""}]}}, (EVERYWHERE, 8000)),
        ({"PortBindings": {"8000/tcp": [{"HostIp": "10.0.0.9", "HostPort": "1"}]}}, (EVERYWHERE, 8000)),
        ({"PortBindings": None}, (EVERYWHERE, 8000)),
    ],
)
def test_a_container_is_read_as_docker_tells_it_and_listens_where_its_port_is_bound(host, listens, expect_golden):
    expect_golden("recipe", "a container", shown(contained()))
    assert contained(**host).listens == listens


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"Entrypoint": None, "Cmd": None}, "give the recipe or script that starts it"),
        ({"Entrypoint": ["python3", "-m", "engine_patches", "worker"]}, "has Seamark's plugin already"),
        (
            {"Labels": {"com.docker.compose.service": "a", "com.docker.compose.project.config_files": "/no/a.yaml"}},
            "is of /no/a.yaml, which is not here",
        ),
    ],
)
def test_a_container_that_does_not_tell_how_vllm_is_started_or_has_the_plugin_is_refused(config, said):
    with pytest.raises(SettingsError, match=said):
        contained(config)


@pytest.mark.parametrize("told", [{}, {**CONTAINER, "HostConfig": None}, {**CONTAINER, "Config": []}])
def test_what_docker_says_and_nobody_understands_is_said(told):
    with pytest.raises(SettingsError, match="what Docker says of llm is not understood"):
        read_recipe("llm", lambda name: told)


def test_a_container_of_compose_is_read_from_its_file(file):
    services = {name: {"image": "vllm/vllm-openai", "command": f"{name}-model"} for name in ("a", "b")}
    path = file("compose.yaml", {"services": services})
    files = f"{path},{path.parent}/override.yaml"
    labels = {"com.docker.compose.service": "b", "com.docker.compose.project.config_files": files}
    recipe = contained({"Labels": labels})
    assert (recipe.kind, recipe.name, recipe.model) == (RecipeKind.COMPOSE, "b", "b-model")
    for missing in labels:
        assert contained({"Labels": {missing: labels[missing]}}).kind is RecipeKind.CONTAINER
    path.write_text("a: [")
    with pytest.raises(SettingsError, match="is no YAML"):
        contained({"Labels": labels})


def promised() -> Iterator[tuple[str, ...]]:
    """Each model of the page: whether it hits, its unit, and what is said of it beside drafts."""
    page = Path(__file__).parents[3] / "deploy" / "SPARK.md"
    table = page.read_text().partition("## Will it help?")[2].partition("\n\n*With")[0]
    for row in re.findall(r"^\| (`.*) \|$", table, re.M):
        models, *told = row.split(" | ")
        yield from ((model, *told) for model in re.findall(r"`([^`]+)`", models))


@pytest.mark.parametrize(("model", "hits", "unit", "beside_drafts"), [*promised()])
def test_what_a_page_promises_of_a_model_is_what_setup_says_of_it(model, hits, unit, beside_drafts):
    alone, beside = said(model), said(f"{model} {MTP % ''}")
    assert bool(alone.hits) == hits.startswith("yes") and f"match unit {unit}" in alone.verdict
    assert bool(beside.hits) != beside_drafts.startswith("no: ")
    assert (beside.change or "") in beside_drafts.replace("`", "")


MTP = """--speculative-config '{"method": "mtp", "num_speculative_tokens": 3%s}'"""

CONNECTOR = """--kv-transfer-config '{"kv_connector": "%s"}'"""

TAKEN = "--mamba-cache-mode align --no-enable-prefix-caching"

QWEN = "Qwen3.6-27B"

LINES = [
    *(QWEN, "org/Qwen3_6-27B-NVFP4", "MiniMax-Text-01", "./models/mine", "Llama-4", "qwen3-32b", "Qwen3-Coder-Next"),
    *("nvidia/NVIDIA-Nemotron-Nano-9B-v2", "granite-4.0-micro", "Starling-34B", "nemotron-340b", "a/../../b"),
    *(f"{QWEN} --prefix-match-unit 128", f"{QWEN} {MTP % ''}", f"""{QWEN} -sc '{{"method": "glm_mtp"}}'"""),
    *(f"Olmo-Hybrid-7B {MTP % ''}", """Olmo-Hybrid-7B --speculative-config '{"method": "ngram"}'"""),
    f"""{QWEN} --speculative-config '{{"model": "some/head"}}'""",
    *(f"{QWEN} -pp 2", f"{QWEN} -pp 1 {MTP % ''}", f"{QWEN} --pipeline-parallel-size=2 {MTP % ''}"),
    f"{QWEN} " + MTP % ', "num_speculative_tokens_per_batch_size": [1]',
    f"{QWEN} " + MTP % ', "enable_adaptive_verification": true',
    f"{QWEN} " + MTP % ', "num_speculative_tokens_per_batch_size": [], "enable_adaptive_verification": false',
    *(f"{QWEN} -sc.method suffix", f"{QWEN} --speculative_config.method suffix"),
    *(f"{QWEN} {CONNECTOR % name}" for name in ("LMCacheMPConnector", "NixlConnector")),
    f"{QWEN} {CONNECTOR % 'NixlConnector'} {MTP % ''}",
    *(f"Llama-4 -pp 2 {MTP % ''}", f"Llama-4 {CONNECTOR % 'LMCacheMPConnector'}"),
    *(f"{QWEN} --load-format b12x", f"{QWEN} --load-format auto", f"{QWEN} --gdn-decode-kernel x"),
    *("Llama-4 --max-parallel-prefills 2", f"{QWEN} --task generate"),
    *(f"{QWEN} {TAKEN}", f"Llama-4 {TAKEN}", f"{QWEN} {TAKEN} --load-format b12x"),
]

# An image, its flags for a build, and the version that is found in it.
IMAGES: list[tuple[str, ...]] = [
    *((f"vllm/vllm-openai:v{tag}", "") for tag in ("0.33.0", "0.31.0", "0.30.2", "0.34.0", "1.32.0", "1234567.1")),
    *(("vllm/vllm-openai:latest", version) for version in ("", "0.28.0")),
    *(("registry:5000/vllm/vllm-openai:v0.3", ""), ("vllm/vllm-openai:latest-cu130", "0.3")),
    ("vllm/vllm-openai-rocm:v0.29.0rc1-x@sha256:0", ""),
    *((f"{owner}/vllm:1", "") for owner in ("voipmonitor", "localinferencelab", "ghcr.io/local-inference-lab")),
    *(("vllm/vllm-openai:v0.28.0", "0.32.1"), ("vllm/vllm-openai:v0.33.0", "0.30.1"), ("mine/vllm:v0.28.0", "")),
    *(("mine:v0.28.0", "0.28.0"), ("vllm-node", "no version"), ("vllm-node", "0.33.1rc1"), ("b12x/vLLM:1", "")),
    *(("B12X/vllm", "0.30.0"), ("x", "", "--ref", "B12x")),
]


def told_of(seen: Outlook) -> str:
    told = {"hits": seen.hits, "change": seen.change, "asks": seen.ask, "taken instead": seen.image}
    return "\n".join([seen.verdict, *(f"{name}: {each}" for name, each in told.items() if each != ""), *seen.notes])


def said(line: str, version: str = "0.33.0", variables: str = "") -> Outlook:
    return outlook(read(f"{variables}vllm serve {line}"), version)


@pytest.mark.parametrize("line", LINES)
def test_what_keeps_from_hits_is_said_with_the_one_change(line, expect_golden):
    expect_golden("outlook", line, told_of(said(line)))


@pytest.mark.parametrize("given", IMAGES)
def test_an_image_is_believed_and_its_tag_if_it_could_not_be_asked(given, expect_golden):
    image, version, *builds = given
    seen = Recipe(RecipeKind.SPARK, "a.yaml", "a", [QWEN], image=image, builds=builds)
    expect_golden("outlook", " ".join(("image", *given)), told_of(outlook(seen, version)))


@pytest.mark.parametrize("kind", RecipeKind)
def test_each_way_has_a_command_that_asks_and_one_that_takes_a_vllm_that_fits(kind, expect_golden):
    image = "" if kind in (RecipeKind.COMMAND, RecipeKind.CONFIG, RecipeKind.LAUNCHER) else "mine:1"
    seen = Recipe(kind, "a", "llm", [QWEN], image=image, document={}, text="/v/bin/vllm serve m")
    expect_golden("outlook", f"of {kind}", told_of(outlook(seen)))


def test_of_several_obstacles_the_first_to_be_changed_is_said():
    assert "0.30.0" in said(f"{QWEN} -pp 2 {CONNECTOR % 'LMCacheMPConnector'} {MTP % ''}", "0.30.0").verdict


@pytest.mark.parametrize(("value", "tried"), [("1", False), ("0", True), ("auto", True)])
def test_drafts_without_a_trial_are_said_by_their_variable(value, tried):
    assert ("trial" in said(f"{QWEN} {MTP % ''}", variables=f"SEAMARK_DRAFTS={value} ").verdict) is tried


@pytest.mark.parametrize("size", ["two", "-1", "9" * 10, "٣"])
def test_a_number_that_is_none_is_refused_with_its_flag(size):
    with pytest.raises(SettingsError, match=f"the command: --pipeline-parallel-size {size} is not a number"):
        said(f"{QWEN} -pp {size} {MTP % ''}")
