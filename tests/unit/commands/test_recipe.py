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
    as_list,
    behind_serve,
    docker_run,
    inner_arguments,
    is_recipe,
    options_of,
    plain,
    port_in,
    read_recipe,
    served,
    serves,
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
    ("options", "taken", "image", "arguments"),
    [
        ("--rm -it --gpus all i m", ["--rm", "-it", "--gpus", "all"], "i", ["m"]),
        ("-d -p 8000:8000 i", ["-d", "-p", "8000:8000"], "i", []),
        ("-p8000:8000 --name=x i --port 1", ["-p8000:8000", "--name=x"], "i", ["--port", "1"]),
        ("-e A=b i", ["-e", "A=b"], "i", []),
        ("--network host -v /a:/b --privileged i a b", None, "i", ["a", "b"]),
        ("i", [], "i", []),
        ("-dp 8000:8000 i m", ["-dp", "8000:8000"], "i", ["m"]),
        ("-itv /a:/b i m", ["-itv", "/a:/b"], "i", ["m"]),
    ],
)
def test_a_docker_run_is_taken_apart_at_its_image(options, taken, image, arguments):
    text = f"# docker run that was\ndocker run {options}\n"
    run = docker_run(text, "")
    assert run.program == "docker" and run.image.value == image
    assert [word.value for word in run.arguments] == arguments
    if taken is not None:
        assert [word.value for word in run.options] == taken
    assert text[run.start : run.end].strip() == options


def test_the_program_of_a_container_is_the_one_that_is_named():
    assert docker_run("sudo podman container run i", "").program == "podman"


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
    ("values", "found"),
    [
        (["-p", "1:2", "--publish", "3:4"], ["1:2", "3:4"]),
        (["--publish=5:6", "-p=7:8"], ["5:6", "7:8"]),
        (["--name", "x", "--publisher=y"], []),
        (["-p"], [""]),
        (["-dp", "1:2", "-p3:4", "-itp5:6"], ["1:2", "3:4", "5:6"]),
    ],
)
def test_an_option_of_docker_is_found_in_each_of_its_spellings(values, found):
    assert list(options_of(values, ("-p", "--publish"))) == found


@pytest.mark.parametrize(
    ("words", "before", "start"),
    [
        (["vllm", "serve", "m"], "", 2),
        (["/venv/bin/vllm", "serve"], "", 2),
        (["serve", "m"], "/bin/vllm", 1),
        (["serve", "m"], "", 0),
        (["serve", "vllm"], "", 0),
        (["vllm", "bench"], "", 0),
        (["python3", "-m", "vllm.entrypoints.openai.api_server", "--model", "m"], "", 3),
        (["m", "--port", "1"], "vllm", 0),
        ([], "vllm", 0),
    ],
)
def test_where_the_arguments_of_vllm_begin(words, before, start):
    assert behind_serve(words, before) == start


@pytest.mark.parametrize(
    ("words", "arguments"),
    [
        (["vllm", "serve", "m", "-a"], ["m", "-a"]),
        (["bash", "-c", "ulimit -l 1; exec vllm serve m --a 'b c' | tee x"], ["m", "--a", "b c"]),
        (["m", "--port", "1"], ["m", "--port", "1"]),
    ],
)
def test_the_arguments_in_a_containers_command(words, arguments):
    assert inner_arguments(words, "it") == arguments


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


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        ("vllm serve m", ["m"]),
        ("/opt/bin/vllm  serve m", ["m"]),
        ("python3 -m vllm.entrypoints.openai.api_server --model m", ["--model", "m"]),
        ("# vllm serve old\n  # vllm serve older\nvllm serve m", ["m"]),
        ("A=1 vllm serve", []),
    ],
)
def test_the_one_command_of_a_text_is_found(text, arguments):
    assert [word.value for word in served(text, "").words] == arguments and serves(text)


@pytest.mark.parametrize("text", ["my-vllm serve m", "vllm server m", "vllm.serve m", "vllm bench serve m"])
def test_what_only_looks_like_it_starts_no_vllm(text):
    assert not serves(text)
    with pytest.raises(SettingsError, match=r"a\.sh: no `vllm serve` in it"):
        served(text, "a.sh")


@pytest.mark.parametrize(
    ("given", "words"),
    [(None, []), ("", []), ("a 'b c'", ["a", "b c"]), (["a b", 1], ["a b", "1"]), (7, ["7"])],
)
def test_a_command_of_compose_is_a_text_or_a_list(given, words):
    assert as_list(given) == words


@pytest.mark.parametrize(
    ("text", "port"),
    [
        ("1", 1),
        ("8000", 8000),
        (8000, 8000),
        ("65535", 65535),
        ("65536", None),
        ("0", None),
        ("", None),
        (None, None),
        ("-1", None),
        ("8000-8010", None),
        ("٣٣", None),
        ("9" * 5000, None),
        ("080000", None),
    ],
)
def test_a_port_is_a_number_that_tcp_has(text, port):
    assert port_in(text) == port


@pytest.mark.parametrize(
    ("argument", "name"),
    [
        ("--max_model_len=5_0", "--max-model-len"),
        ("--port", "--port"),
        ("a_b", "a_b"),
        ("-sc.method=x", "-sc.method"),
        ("a=b", "a"),
    ],
)
def test_a_flag_is_compared_with_dashes_and_without_its_value(argument, name):
    assert plain(argument) == name


def command(*arguments: str, **more: Any) -> Recipe:
    return Recipe(RecipeKind.COMMAND, "a line", "", arguments, **more)


def config(**document: Any) -> Recipe:
    return Recipe(RecipeKind.CONFIG, "a.yaml", "a", (), document=document)


@pytest.mark.parametrize(
    ("recipe", "model"),
    [
        (command("m", "--model", "n"), "m"),
        (command("--model", "n"), "n"),
        (command("--model=n"), "n"),
        (command("--port", "1"), ""),
        (command(), ""),
        (config(model="c"), "c"),
        (config(port=1), ""),
    ],
)
def test_the_model_is_the_first_argument_or_a_flag(recipe, model):
    assert recipe.model == model


@pytest.mark.parametrize(
    ("arguments", "flags", "value"),
    [
        (["--a", "1", "--b", "2"], ["--a"], "1"),
        (["--a", "1", "--a", "2"], ["--a"], "2"),
        (["--a=1=2"], ["--a"], "1=2"),
        (["--a_b=1"], ["--a-b"], "1"),
        (["--a", "1", "-x", "2"], ["--a", "-x"], "2"),
        (["--a"], ["--a"], ""),
        (["--a="], ["--a"], ""),
        (["--ab", "1"], ["--a"], ""),
        ([], ["--a"], ""),
    ],
)
def test_the_last_value_of_a_flag_counts(arguments, flags, value):
    assert command(*arguments).value(*flags) == value


def test_a_configuration_of_vllm_has_its_flags_with_either_spelling():
    recipe = config(model="m", max_model_len=8192, **{"kv-cache-dtype": "fp8"})
    assert (recipe.value("--max-model-len"), recipe.value("--no", "--kv-cache-dtype")) == ("8192", "fp8")
    assert recipe.has("--max-model-len") and not recipe.has("--port")
    nested = config(speculative_config={"method": "mtp"}, kv_transfer_config=None, compilation_config="{}")
    assert nested.fields("--speculative-config") == {"method": "mtp"}
    assert nested.fields("--kv-transfer-config") == nested.fields("--compilation-config") == {}


def test_a_flag_is_there_with_or_without_a_value():
    recipe = command("m", "--a", "--b_c=1")
    assert recipe.has("--a") and recipe.has("--b-c") and not recipe.has("--c") and not recipe.has("m_")


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


@pytest.mark.parametrize(
    ("recipe", "host", "port"),
    [
        (command(), EVERYWHERE, 8000),
        (command("--host", "10.0.0.1", "--port", "8001"), "10.0.0.1", 8001),
        (command("--port", "8001", listens=("127.0.0.1", 9000)), "127.0.0.1", 9000),
        (config(port=8002, host="::"), "::", 8002),
    ],
)
def test_clients_find_vllm_where_it_listens(recipe, host, port):
    assert (recipe.host, recipe.port) == (host, port)


def test_a_port_that_is_none_is_said_in_short():
    with pytest.raises(SettingsError, match=f"a line: --port {'9' * 64} is no port"):
        _ = command("--port", "9" * 5000).port


@pytest.mark.parametrize(("value", "has"), [("1", True), (" 1 ", True), ("0", False), ("", False), (None, False)])
def test_the_frontend_in_rust_is_known_by_its_variable(value, has):
    environment = {} if value is None else {"VLLM_USE_RUST_FRONTEND": value}
    assert command("m", environment=environment).has_rust_frontend is has


def test_a_file_that_says_how_vllm_is_run_is_told_from_a_model(tmp_path, file):
    for name in ("a.yaml", "a.yml", "a.sh"):
        assert not is_recipe(str(tmp_path / name))
        assert is_recipe(str(file(name, "")))
    (tmp_path / "b.yaml").mkdir()
    assert not is_recipe(str(tmp_path / "b.yaml")) and not is_recipe(str(file("a.json", "")))


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


def test_a_path_may_begin_with_the_home_folder(monkeypatch, tmp_path, file):
    monkeypatch.setenv("HOME", str(tmp_path))
    file("mine.sh", "vllm serve m")
    recipe = read("~/mine.sh")
    assert (recipe.source, recipe.name, recipe.kind) == (str(tmp_path / "mine.sh"), "mine", RecipeKind.COMMAND)


def test_a_line_of_a_shell_is_no_file(monkeypatch):
    monkeypatch.setenv("SEAMARK_TEST_PORT", "8005")
    line = "A=1 B='2' vllm serve ${MODEL_UNSET:-m} --port $SEAMARK_TEST_PORT --host ${UNSET_HERE} # for now"
    recipe = read(line)
    assert (recipe.kind, recipe.source, recipe.name, recipe.text) == (RecipeKind.COMMAND, "the command", "", line)
    assert list(recipe.arguments) == ["m", "--port", "8005", "--host", ""]
    assert recipe.environment == {"A": "1", "B": "2"} and recipe.image == "" and recipe.listens is None


def test_what_a_script_sets_itself_wins_over_what_is_set_here(monkeypatch):
    monkeypatch.setenv("MODEL", "theirs")
    assert read("MODEL=mine; vllm serve $MODEL").model == "mine"
    assert read("MODEL='org/my m'\nvllm serve $MODEL").model == "org/my m"
    assert read("MODEL=mine PORT=1 vllm serve $MODEL").environment == {"MODEL": "mine", "PORT": "1"}
    assert read("MODEL=\nvllm serve ${MODEL:-m}").model == "m"
    assert read("vllm serve $MODEL; MODEL=later").model == "theirs"
    assert read("A='open\nvllm serve $MODEL").environment == {}


def test_a_command_for_the_launcher_is_known_by_its_name_in_the_same_paragraph():
    assert read("./launch-cluster.sh exec vllm serve m").kind is RecipeKind.LAUNCHER
    assert read("./launch-cluster.sh stop\n\nvllm serve m").kind is RecipeKind.COMMAND
    assert read("vllm serve m\n./launch-cluster.sh stop").kind is RecipeKind.COMMAND


SPARK = {"name": "x", "container": "vllm-node", "command": "export A_B=1\nvllm serve m --port {port} {{x}}"}


def test_a_recipe_of_spark_vllm_docker_is_filled_with_its_defaults(file):
    document = {**SPARK, "defaults": {"port": 8007}, "env": {"C": 2, "D": None}, "build_args": ["--a", 1]}
    recipe = read(file("my.yaml", document))
    assert (recipe.kind, recipe.name, recipe.image) == (RecipeKind.SPARK, "my", "vllm-node")
    assert list(recipe.arguments) == ["m", "--port", "8007", "{x}"] and recipe.builds == ("--a", "1")
    assert recipe.environment == {"A_B": "1", "C": "2", "D": ""} and recipe.document == document
    assert (recipe.host, recipe.port) == (EVERYWHERE, 8007)
    plainest = read(file("plain.yaml", {**SPARK, "command": "vllm serve m"}))
    assert plainest.environment == {} and plainest.builds == () and plainest.port == 8000


def test_a_configuration_of_vllm_is_known_by_its_model(file):
    recipe = read(file("m.yaml", {"model": "org/m", "port": 8001}))
    assert (recipe.kind, recipe.name, recipe.model, recipe.port) == (RecipeKind.CONFIG, "m", "org/m", 8001)


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


def test_the_first_port_of_compose_that_leads_to_vllm_counts(file):
    recipe = composed(file, ports=["9000:8001", "9002:8001"])
    assert recipe.port == 9000


def test_a_service_with_the_network_of_its_machine_listens_as_vllm_does(file):
    recipe = composed(file, network_mode="host", ports=["9000:8001"])
    assert (recipe.host, recipe.port, recipe.listens) == (EVERYWHERE, 8001, None)


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


def test_of_services_the_one_that_runs_vllm_is_taken_whatever_its_image(file):
    recipe = composed(file, image="mine:1", command="bash -c 'exec vllm serve m'")
    assert list(recipe.arguments) == ["m"]
    recipe = composed(file, image="mine:1", entrypoint="vllm serve", command=["m"])
    assert list(recipe.arguments) == ["m"]


def contained(config: Mapping[str, Any] | None = None, **host: Any) -> Recipe:
    told = {**CONTAINER, "Config": {**CONTAINER["Config"], **(config or {})}}
    told["HostConfig"] = {**CONTAINER["HostConfig"], **host}
    return read_recipe("llm", lambda name: told if name == "llm" else None)


def test_a_container_is_read_as_docker_tells_it():
    recipe = contained()
    assert (recipe.kind, recipe.source, recipe.name) == (RecipeKind.CONTAINER, "llm", "llm")
    assert recipe.image == "vllm/vllm-openai:v0.33.0" and list(recipe.arguments) == ["org/m", "--port", "8001"]
    assert recipe.environment == {"PATH": "/bin", "A": "b=c", "EMPTY": ""}
    assert (recipe.host, recipe.port) == ("10.0.0.7", 9001) and recipe.document["Name"] == "/llm"


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


def test_a_container_without_a_flag_for_its_port_has_that_of_vllm():
    recipe = contained({"Cmd": ["m"]}, PortBindings={"8000/tcp": [{"HostPort": "9000"}]})
    assert recipe.port == 9000


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


def test_a_docker_run_is_read_with_its_environment_and_the_variables_before_it(monkeypatch):
    monkeypatch.setenv("TAG", "theirs")
    text = "TAG=v1\nMODEL=org/m\ndocker run -e A=$MODEL --env=B=b -e C img:$TAG bash -c 'vllm serve $MODEL --x' # y\n"
    recipe = read(text)
    assert (recipe.kind, recipe.source, recipe.name) == (RecipeKind.DOCKER, "the command", "")
    assert recipe.image == "img:v1" and recipe.environment == {"A": "org/m", "B": "b", "C": ""}
    assert list(recipe.arguments) == ["org/m", "--x"] and recipe.text == text


def test_a_docker_run_in_a_comment_is_none(file):
    path = file("a.sh", "# docker run was how\nvllm serve m\n")
    assert read(path).kind is RecipeKind.COMMAND
