"""How vLLM is run, read from a line, a script, a file or Docker: what is refused. What is read: `tests/data/setup`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from proxy.commands.recipe import EVERYWHERE, Recipe, RecipeKind, published
from proxy.commands.recipe_compose import as_port
from proxy.commands.recipe_reader import read_recipe
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


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        ("""--sc '{"method": "mtp", "n": 2}'""", {"method": "mtp", "n": 2}),
        ("""-sc '{"n": 1}' --sc.method mtp""", {"n": 1, "method": "mtp"}),
        ("-sc.method mtp --sc.n=2", {"method": "mtp", "n": "2"}),
        ("--s_c.num_tokens 4 --s-c.method=dspark", {"num_tokens": "4", "method": "dspark"}),
        *(("--sc.method", {"method": ""}), ("--sc '[1]'", {}), ("--scx.method mtp", {})),
        ("""-sc '{"n": 1}' --sc '{"n": 2}' -sc '{"n": 3}'""", {"n": 3}),
        ('--sc "{\\"n\\": $NOT_SET}" --sc.m $NOT_SET', {"m": "$NOT_SET"}),
    ],
)
def test_fields_are_given_as_json_or_one_by_one(flags, told):
    assert read(f"vllm serve m {flags}").fields("--sc", "-sc", "--s-c") == told


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
        *(("a.yaml", f"model: m\n{text}", "its values are too many") for text in (BOMB, "a: &a [*a]")),
        *(
            ("a.yaml", f"model: m\na: {odd}", "cannot be read as YAML")
            for odd in ('"\\ud800"', "2026-13-01", "9" * 5000, "[" * 500)
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
        ("a.yaml", "name: x\ncontainer: c\ncommand: sleep 1\n", "no `vllm serve` among its commands"),
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
        *(("a.sh", f"vllm serve {odd * 999}", "too many inside each other") for odd in ("$(", '"${x:-')),
        *(("a.sh", f"docker run {options}\n", "names no image") for options in ("", "-", "--", "--rm", "-v a")),
        ("a.sh", "vllm.entrypoints.openai.api_server --port 1", "nothing says which model vLLM serves"),
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
        *((port, (EVERYWHERE, 9000)) for port in ("9000:8001", ":9000:8001/tcp", {"target": 8001, "published": 9000})),
        *(("10.0.0.7:9000:8001", ("10.0.0.7", 9000)), ("[::1]:9000:8001", ("::1", 9000))),
        *(("::1:9000:8001", ("::1", 9000)), ({"target": "8001", "published": "1", "host_ip": "a"}, ("a", 1))),
        *(("7000-7002:8000-8002", (EVERYWHERE, 7001)), ({"target": 8001, "published": "9-9"}, (EVERYWHERE, 9))),
        *((port, None) for port in ({"target": 8001}, {"target": 80, "published": 9000}, "8001", 8001, "9000:8000")),
        *((port, None) for port in ("9000-9005:8001", "9000:8001/udp", "9000:8001-8002", "99999:8001", "x:y", "")),
    ],
)
def test_a_port_leads_to_that_of_vllm_or_counts_for_nothing(port, listens):
    assert published(as_port(port), 8001) == listens


def contained(config: Mapping[str, Any] | None = None, **host: Any) -> Recipe:
    told = {**CONTAINER, "Config": {**CONTAINER["Config"], **(config or {})}}
    told["HostConfig"] = {**CONTAINER["HostConfig"], **host}
    return read_recipe("llm", lambda name: told if name == "llm" else None)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"Entrypoint": None, "Cmd": None}, "nothing says which model vLLM serves"),
        ({"Entrypoint": ["python3", "-m", "engine_patches", "worker"]}, "has Seamark's plugin already"),
        (
            {"Labels": {"com.docker.compose.service": "a", "com.docker.compose.project.config_files": "/no/a.yaml"}},
            "/no/a.yaml cannot be read",
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
    files = f"{path},{file('override.yaml', {'services': {'b': {'command': 'theirs'}}})}"
    labels = {"com.docker.compose.service": "b", "com.docker.compose.project.config_files": files}
    recipe = contained({"Labels": labels})
    assert (recipe.kind, recipe.name, recipe.model) == (RecipeKind.COMPOSE, "b", "theirs")
    for missing in labels:
        assert contained({"Labels": {missing: labels[missing]}}).kind is RecipeKind.DOCKER
    path.write_text("a: [")
    with pytest.raises(SettingsError, match="is no YAML"):
        contained({"Labels": labels})
