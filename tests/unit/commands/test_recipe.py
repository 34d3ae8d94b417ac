"""How vLLM is run, read from a line, a script, a file, or what Docker says of a container."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from proxy.commands.recipe import (
    EVERYWHERE,
    Recipe,
    RecipeKind,
    docker_run,
    inner_arguments,
    read_recipe,
    words_of,
)
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


def nothing(name: str) -> None:
    """No Docker is here."""
    return


def read(given: str | Path) -> Recipe:
    return read_recipe(str(given), nothing)


@pytest.fixture
def file(tmp_path: Path) -> Callable[[str, Any], Path]:
    """`file(name, what)`: a file with a text, or with something as YAML."""

    def file(name: str, what: Any) -> Path:
        path = tmp_path / name
        path.write_text(what if isinstance(what, str) else yaml.safe_dump(what))
        return path

    return file


@pytest.mark.parametrize(
    ("text", "words", "rest"),
    [
        ("a b\tc", ["a", "b", "c"], ""),
        ("  a  ", ["a"], "  "),
        ("", [], ""),
        ("a 'b  c' d", ["a", "b  c", "d"], ""),
        ("a'b'c'' '' d", ["abc", "", "d"], ""),
        (r"""'a\' "b" """, ["a\\", "b"], " "),
        (r'"a \"b\" \$c \\ \` \x"', [r'a "b" $c \ ` \x'], ""),
        ('"a\\\nb"', ["a\nb"], ""),
        (r"a\ b \'c", ["a b", "'c"], ""),
        ("a \\\n  b\\\n c", ["a", "b", "c"], ""),
        ("a \\\r\n  b\\\r\n c\r\nd", ["a", "b", "c"], "\r\nd"),
        ("a \\", ["a", ""], ""),
        ("a\nb", ["a"], "\nb"),
        *((f"a {stop} b", ["a"], f" {stop} b") for stop in ("#", ";", "&", "&&", "|", "<", ">", "(", ")")),
        ("a#b", ["a#b"], ""),
        ("a; b", ["a"], "; b"),
        ("a|b", ["a"], "|b"),
        ("a 2>&1", ["a"], " 2>&1"),
        ("a 0<b", ["a"], " 0<b"),
        ("a b>c", ["a", "b"], ">c"),
        ("a 2 b", ["a", "2", "b"], ""),
        ("${A:-b c}d $(e f) $G", ["${A:-b c}d", "$(e f)", "$G"], ""),
        ("--a='{\"b\": 1}' c", ['--a={"b": 1}', "c"], ""),
    ],
)
def test_words_are_those_of_a_shell_up_to_the_end_of_its_command(text, words, rest):
    line = words_of(f"vllm serve {text}", 11, "a line")
    assert [word.value for word in line.words] == words
    assert line.start == 11 and f"vllm serve {text}"[line.end :] == rest
    spelt = f"vllm serve {text}"[line.start : line.end]
    assert all(word.raw in spelt for word in line.words)


def test_a_word_is_kept_as_it_is_spelt():
    spelt = [word.raw for word in words_of(r"""'a b' "c" ${D:-e f} g\ h""", 0, "").words]
    assert spelt == ["'a b'", '"c"', "${D:-e f}", r"g\ h"]


@pytest.mark.parametrize("end", ["'x", '"x', '"x\\"', '"x\\', "${x", "$(x", "y'x"])
def test_a_quote_that_is_not_closed_is_said_with_where_it_begins(end):
    with pytest.raises(SettingsError) as error:
        words_of(f"a {end}", 0, "run.sh")
    assert str(error.value) == f"run.sh: a quote behind `{end}` is not closed"
    with pytest.raises(SettingsError, match="behind `" + "'" + "x" * 29 + "` is"):
        words_of("a '" + "x" * 100, 0, "")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("docker run a\ndocker run b", "run.sh: more than one `docker run`"),
        ("docker run --rm", "run.sh: `docker run` names no image"),
        ("docker run -e", "names no image"),
    ],
)
def test_a_docker_run_that_cannot_be_read_is_said(text, said):
    with pytest.raises(SettingsError, match=said):
        docker_run(text, "run.sh")


@pytest.mark.parametrize(
    ("words", "by_image", "said"),
    [
        (["python3", "-m", "engine_patches", "worker", "m"], True, "has Seamark's plugin already"),
        ([], True, "nothing says which model"),
        (["sleep", "1"], False, "nothing says which model"),
        (["sh", "-c", "vllm serve a; vllm serve b"], True, "more than one `vllm serve`"),
    ],
)
def test_a_containers_command_that_tells_nothing_is_refused(words, by_image, said):
    with pytest.raises(SettingsError, match=f"it.*{said}"):
        inner_arguments(words, "it", by_image=by_image)


def command(*arguments: str, **more: Any) -> Recipe:
    return Recipe(RecipeKind.COMMAND, "a line", "", arguments, **more)


def config(**document: Any) -> Recipe:
    return Recipe(RecipeKind.CONFIG, "a.yaml", "a", (), document=document)


def test_a_configuration_of_vllm_has_its_flags_with_either_spelling():
    recipe = config(model="m", max_model_len=8192, **{"kv-cache-dtype": "fp8"})
    assert (recipe.value("--max-model-len"), recipe.value("--no", "--kv-cache-dtype")) == ("8192", "fp8")
    assert recipe.has("--max-model-len") and not recipe.has("--port")
    nested = config(speculative_config={"method": "mtp"}, kv_transfer_config=None, compilation_config="{}")
    assert nested.fields("--speculative-config") == {"method": "mtp"}
    assert nested.fields("--kv-transfer-config") == nested.fields("--compilation-config") == {}


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--sc", '{"method": "mtp", "n": 2}'], {"method": "mtp", "n": 2}),
        (["-sc", '{"method": "mtp"}'], {"method": "mtp"}),
        (["--sc.method", "mtp", "--sc.n=2"], {"method": "mtp", "n": "2"}),
        (["-sc.method", "mtp"], {"method": "mtp"}),
        (["--sc", '{"n": 1}', "--sc.method", "mtp"], {"n": 1, "method": "mtp"}),
        (["--sc.method"], {"method": ""}),
        (["--sc", "[1]"], {}),
        (["--sc", ""], {}),
        (["--scx.method", "mtp"], {}),
        ([], {}),
    ],
)
def test_fields_are_given_as_json_or_one_by_one(arguments, told):
    assert command(*arguments).fields("--sc", "-sc") == told


def test_fields_that_are_no_json_are_said_with_the_flag():
    with pytest.raises(SettingsError, match=r"a line: --sc is no JSON: \{$"):
        command("-sc", "{").fields("--sc", "-sc")


def test_a_port_that_is_none_is_said_in_short():
    with pytest.raises(SettingsError, match=f"a line: --port {'9' * 64} is no port"):
        _ = command("--port", "9" * 5000).port


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("a.yaml", "name: x\ncontainer: c\ncommand: vllm serve m --port {port}\n", "wants {port}, which `defaults:`"),
        ("a.yaml", "name: x\ncommand: vllm serve m\n", "has a text for container"),
        ("a.yaml", "command: 1\n", "has a text for name, container, command"),
        ("a.yaml", "name: x\ncontainer: c\ncommand: vllm serve {m\n", "`command:` is no template"),
        ("a.yaml", "name: x\ncontainer: c\ncommand: vllm serve {}\n", "`command:` is no template"),
        ("a.yaml", "name: x\ncontainer: c\ncommand: sleep 1\n", "no `vllm serve` in it"),
        ("a.yaml", "a: [", "is no YAML: line 1"),
        ("a.yaml", "a: 1\nb: [\nc: d: e", "is no YAML: line 3"),
        ("a.yaml", "a: \x07", "is no YAML"),
        ("a.yaml", "a: 1", "has no `command:`"),
        ("a.yml", "[a]", "says nothing of how vLLM is run"),
        ("a.yaml", "", "says nothing of how vLLM is run"),
        ("a.yaml", "services: {a: {image: redis}}", "no service that runs vLLM"),
        ("a.yaml", "services: {a: {image: redis, command: vllm}}", "no service that runs vLLM"),
        ("a.yaml", "services: {a: {image: vllm/vllm-openai}}", "no service that runs vLLM"),
        ("a.yaml", "services: [a]", "no service that runs vLLM"),
        ("a.yaml", "services: {a: text}", "no service that runs vLLM"),
        (
            "a.yaml",
            "services: {a: {image: vllm/vllm-openai, command: m}, b: {image: vllm/vllm-openai, command: m}}",
            "2 services with vLLM (a, b)",
        ),
        ("a.yaml", "services: {a: {build: ., command: vllm serve m}}", "the service a has no `image:`"),
        ("a.sh", "vllm serve a\nvllm serve b\n", "more than one `vllm serve`"),
        ("a.sh", "echo\n", "no `vllm serve`"),
        ("a.sh", "docker run --rm\n", "names no image"),
    ],
)
def test_a_file_that_cannot_be_read_is_refused_with_what_is_missing(name, text, said, file):
    path = file(name, text)
    with pytest.raises(SettingsError) as error:
        read(path)
    assert said in str(error.value) and str(path) in str(error.value)


def test_what_is_no_file_no_command_and_no_container_is_refused(tmp_path):
    asked: list[str] = []
    for given in ("qwen36", "no/where.yaml", "-x", "a b"):
        with pytest.raises(SettingsError, match="is no file, no command with `vllm serve`, and no container"):
            read_recipe(given, asked.append)
    assert asked == ["qwen36"]  # Docker is asked for what may be a name
    with pytest.raises(SettingsError, match="is a folder"):
        read(tmp_path)
    binary = tmp_path / "binary"
    binary.write_bytes(b"\xff\xfe")
    with pytest.raises(SettingsError, match=r"cannot be read \(UnicodeDecodeError\)"):
        read(binary)


def composed(file: Callable[[str, Any], Path], **service: Any) -> Recipe:
    whole = {"image": "vllm/vllm-openai:v0.33.0", "command": "m --port 8001", **service}
    return read(file("compose.yaml", {"services": {"db": {"image": "redis"}, "llm": whole}}))


@pytest.mark.parametrize(
    ("port", "host", "published"),
    [
        ("9000:8001", EVERYWHERE, 9000),
        ("9000:8001/tcp", EVERYWHERE, 9000),
        ("10.0.0.7:9000:8001", "10.0.0.7", 9000),
        ("[::1]:9000:8001", "::1", 9000),
        ("${ADDRESS:-10.0.0.8}:9000:8001", "10.0.0.8", 9000),
        ({"target": 8001, "published": 9000}, EVERYWHERE, 9000),
        ({"target": "8001", "published": "9000", "host_ip": "10.0.0.7"}, "10.0.0.7", 9000),
        ({"target": 8001}, "127.0.0.1", 8001),
        ({"target": 80, "published": 9000}, "127.0.0.1", 8001),
        ("8001", "127.0.0.1", 8001),
        (8001, "127.0.0.1", 8001),
        ("9000:8000", "127.0.0.1", 8001),
        ("9000-9005:8001", "127.0.0.1", 8001),
    ],
)
def test_a_port_of_compose_leads_to_that_of_vllm_or_counts_for_nothing(port, host, published, file, monkeypatch):
    monkeypatch.delenv("ADDRESS", raising=False)
    recipe = composed(file, ports=["53:53/udp", port])
    assert (recipe.host, recipe.port, recipe.name) == (host, published, "llm")


def test_a_service_is_read_with_the_variables_of_its_folder_and_those_set_here(file, monkeypatch):
    monkeypatch.setenv("HERE", "here")
    monkeypatch.delenv("THERE", raising=False)
    file(".env", "HERE=file\n  THERE = \nTHERE='there'\n#COMMENT=x\nno assignment\n")
    recipe = composed(
        file,
        image="${THERE}/vllm:1",
        entrypoint=["vllm", "serve"],
        command=["$HERE", "--a", "${COMMENT:-none}"],
        environment=["A=$THERE", "B"],
    )
    assert list(recipe.arguments) == ["here", "--a", "none"] and recipe.image == "there/vllm:1"
    assert recipe.environment == {"A": "there", "B": ""} and recipe.kind is RecipeKind.COMPOSE


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
        ({"PortBindings": {"8001/tcp": []}}, (EVERYWHERE, 8000)),
        ({"PortBindings": None}, (EVERYWHERE, 8000)),
    ],
)
def test_a_container_listens_where_its_port_is_bound(host, listens):
    assert contained(**host).listens == listens


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"Entrypoint": None, "Cmd": ["sleep", "infinity"]}, "give the recipe or script that starts it"),
        ({"Entrypoint": None, "Cmd": None}, "give the recipe or script that starts it"),
        ({"Entrypoint": ["python3", "-m", "engine_patches", "worker"]}, "has Seamark's plugin already"),
        ({"Env": 5}, r"not understood \(TypeError\)"),
        (
            {"Labels": {"com.docker.compose.service": "a", "com.docker.compose.project.config_files": "/no/a.yaml"}},
            "is of /no/a.yaml, which is not here",
        ),
    ],
)
def test_a_container_that_does_not_tell_how_vllm_is_started_or_has_the_plugin_is_refused(config, said):
    with pytest.raises(SettingsError, match=said):
        contained(config)


@pytest.mark.parametrize("told", [{}, {"Config": {}}, {**CONTAINER, "HostConfig": None}, {**CONTAINER, "Config": []}])
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
    with pytest.raises(SettingsError, match="not understood"):
        contained({"Labels": labels})


def ran(*words: str) -> Recipe:
    return read(" ".join(("docker run", *words)))


@pytest.mark.parametrize(
    ("words", "listens"),
    [
        (["-p", "9000:8000", "vllm/vllm-openai", "m"], (EVERYWHERE, 9000)),
        (["-dp", "9000:8000", "vllm/vllm-openai", "m"], (EVERYWHERE, 9000)),
        (["--publish=10.0.0.7:9000:8001", "i", "m", "--port", "8001"], ("10.0.0.7", 9000)),
        (["-p", "9001:1", "-p", "9000:8000", "i", "m"], (EVERYWHERE, 9000)),
        (["-p", "9000:8001", "i", "m"], ("127.0.0.1", 8000)),
        (["i", "m"], ("127.0.0.1", 8000)),
        (["--network", "host", "-p", "9000:8000", "i", "m"], None),
        (["--net=host", "i", "m"], None),
        (["--network", "bridge", "i", "m"], ("127.0.0.1", 8000)),
    ],
)
def test_a_docker_run_listens_where_its_port_is_published(words, listens):
    assert ran(*words).listens == listens
