"""What `seamark doctor` says (`golden/doctor.txt`), its cures (`golden/cures.txt`), and how it finds how vLLM is run.

What sockets and processes show beyond that: `tests/gateway/test_live.py`.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from proxy.commands import doctor, outlook, ways
from proxy.commands.cures import Cures, release_line
from proxy.commands.doctor import STATUS
from proxy.commands.ways import FoundWay, Way, docker_inspect, find
from proxy.fleet import worker_metrics
from proxy.http.client import Broken, Silent, Unreachable
from proxy.observability.shadow import shadow_lines
from tests.harness.fake_engine import engine_info
from tests.harness.in_memory_gateway import Reachable
from tests.harness.recording_worker import RecordingWorker, respond

URL = "http://127.0.0.1:8000"
GATEWAY = "http://127.0.0.1:8080"
DRAFTS = "vllm:spec_decode_num_drafts_total 0.0\n"
CONFIG = 'vllm:cache_config_info{block_size="%d",enable_prefix_caching="%s",mamba_block_size="%s"} 1.0\n'

WAITS = 'seamark_long_prefill_waits_seconds_total{threshold="1024"} %s\n'

# What vLLM 0.32 answers without the flags.
NO_PARSER = b'{"error":{"message":"\\"auto\\" tool choice requires --enable-auto-tool-choice and --tool-call-parser to '
NO_PARSER += b'be set","type":"BadRequestError","param":null,"code":400}}'


class Server(RecordingWorker):
    """A worker with some pages of its own: status and body by path."""

    pages: Mapping[str, tuple[int, bytes]] = {}

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["path"] in self.pages:
            status, body = self.pages[scope["path"]]
            return await respond(send, body, status=status)
        return await super().__call__(scope, receive, send)


def pages(*given: Any, **state: Any) -> Server:
    """A server with `path, status, body` of its own."""
    made = Server(**state)
    made.pages = {given[at]: given[at + 1 : at + 3] for at in range(0, len(given), 3)}
    return made


def match_unit(unit: int, block: int | None) -> RecordingWorker:
    info = engine_info().replace('match_unit="16"', f'match_unit="{unit}"')
    return RecordingWorker(patched=False, more_metrics=info + CONFIG % (384, "True", block))


def beside(connector: str, lane: str) -> RecordingWorker:
    """One whose plugin runs beside a KV connector."""
    info = engine_info().replace("{", f'{{connector="{connector}",lane="{lane}",')
    return RecordingWorker(patched=False, more_metrics=info)


def drafting(state: str) -> RecordingWorker:
    return RecordingWorker(drafts=(state, "worse", ""), ahead=1, more_metrics=DRAFTS)


def rust(*lacks: str, has_feed: bool = True) -> RecordingWorker:
    """vLLM's frontend in Rust, whose reports are read at a port of their own."""
    made = RecordingWorker(patched=False, boot="", more_metrics=DRAFTS, lacks=lacks, has_feed=has_feed)
    made.sources = {"0": {"publisher": "null", "endpoint": "tcp://127.0.0.1:8001", "topic": "seamark"}}
    return made


def gateway(status: int = 200, **answer: Any) -> Server:
    told = json.dumps({"warnings": ["Workers differ."], **answer}).encode()
    return pages("/health", 200, b'{"gateway":"g"}', STATUS, status, told)


SHADOW: Mapping[str, Any] = {
    "watched_seconds": 7200.0,
    "requests": {"judged": 12345, "no_usage": 2, "no_room": 1, "other": 1000},
    "waiting": 1200,
    "lost": {"salted": {"tokens": 5, "seconds": 0.25}, "unpatched": {"tokens": 1234567, "seconds": 61.5}},
    "tokens_without_seconds": 7000,
    "cached_not_told": 8000,
}
UNTOLD = b'{"usage": {"prompt_tokens": 1}}'

# What answers, and the flags.
WORKERS: dict[str, tuple[Any, ...]] = {
    "a patched worker": (RecordingWorker(),),
    "no plugin": (RecordingWorker(patched=False, more_metrics=CONFIG % (2096, "True", 16)),),
    "prefix caching off": (RecordingWorker(more_metrics=CONFIG % (384, "False", 16)),),
    "hints refused for a layer": (
        RecordingWorker(refused="a layer has a sliding window", more_metrics=DRAFTS + CONFIG % (528, "True", 528)),
        *("--runs-as", "docker"),
    ),
    **{f"drafts, {state}": (drafting(state),) for state in ("trial", "closed", "open", "on")},
    "drafts with hints": (RecordingWorker(ahead=16, more_metrics=DRAFTS),),
    "drafts without the plugin": (RecordingWorker(patched=False, more_metrics=DRAFTS),),
    "match unit of a delta net": (match_unit(64, 528),),
    "long prompts that hold others up": (RecordingWorker(more_metrics=WAITS % 312.4),),
    "long prompts that hardly do": (RecordingWorker(more_metrics=WAITS % 0.9),),
    "match unit too coarse": (match_unit(65, 528),),
    "match unit without a recurrent layer": (match_unit(384, None),),
    "a connector inside a pass": (beside("NixlConnector+Mine", "inside_pass"),),
    "a connector at chunk ends": (beside("Mine", "chunk_ends"),),
    "a connector not served": (beside("Mine", "not_served"),),
    "a connector of a later plugin": (beside("Mine", "of_a_later_plugin"),),
    "a connector that refuses hints": (beside("DecodeBenchConnector", "no_hints"),),
    "no completion": (RecordingWorker(status=500),),
    "an odd completion": (pages("/v1/completions", 200, b"[]"),),
    "hits not reported": (pages("/v1/completions", 200, UNTOLD),),
    "no feed": (RecordingWorker(has_feed=False), "--runs-as", "kubernetes"),
    "no render route": (RecordingWorker(render_status=404),),
    "no tools": (pages("/v1/chat/completions", 400, NO_PARSER, models=("zai-org/GLM-5.3-Flash",)),),
    "tools, not to be told": (pages("/v1/chat/completions", 422, NO_PARSER),),
    "tools, another refusal": (pages("/v1/chat/completions", 400, b"{}"),),
    "Rust, lacking routes": (rust("/v1/messages", "/v1/responses", "/v1/chat/completions/render"),),
    "Rust, lacking renders": (rust("/v1/chat/completions/render"),),
    "Rust, reports not read": (rust("/v1/chat/completions/render", has_feed=False),),
    "reports of the server itself": (pages("/seamark/metrics", 404, b"", reports="127.0.0.1:1"),),
    "reports of nobody": (pages("/seamark/metrics", 404, b"", reports="127.0.0.1:1", has_feed=False),),
    "an older plugin": (RecordingWorker(version="0.2.0"), "--runs-as", "compose"),
    "a later plugin": (RecordingWorker(version="1.0.0"),),
    "no key": (RecordingWorker(api_key="hunter3"),),
    "a wrong key": (RecordingWorker(api_key="hunter3"), "--worker-api-key-file", "KEY"),
    "the right key": (RecordingWorker(api_key="hunter2"), "--worker-api-key-file", "KEY"),
    "forbidden": (pages("/v1/models", 403, b"{}"),),
    "not well": (pages("/v1/models", 500, b"{}"),),
    "not vLLM": (pages("/v1/models", 404, b"{}"),),
    "no models": (pages("/v1/models", 200, b'{"data":[]}'),),
    "odd metrics": (RecordingWorker(more_metrics="vllm:num_requests_running NaN\n"),),
    "asleep": (RecordingWorker(sleeps=(1,)),),
    "silent": (Silent(""),),
    "no HTTP": (Broken("x"),),
    "no route": (Unreachable("no route"),),
    "a gateway": (gateway(),),
}


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing shows how vLLM is run."""
    monkeypatch.setattr(doctor, "find", lambda url: None)


@pytest.fixture
def examined(capsys: pytest.CaptureFixture[str], reachable: Reachable, tmp_path: Path) -> Callable[..., str]:
    """`examined(*flags, url=URL)`: the exit status and what the doctor prints."""
    key = tmp_path / "key"
    key.write_text("hunter2\n")

    def examined(*flags: str, url: str = URL) -> str:
        status = doctor.main(["--worker", url, *(str(key) if each == "KEY" else each for each in flags)])
        out, err = capsys.readouterr()
        assert not err and reachable.unclosed == 0
        assert "sesame" not in out and "hunter" not in out
        return f"exit status {status}\n{out}"

    return examined


@pytest.mark.parametrize("case", WORKERS)
def test_of_what_answers_the_verdict_the_causes_and_the_cures_are_said(case, examined, reachable, expect_golden):
    server, *flags = WORKERS[case]
    if isinstance(server, Exception):
        reachable.faults[URL] = server
    else:
        reachable.add(server)
    expect_golden("doctor", case, examined(*flags))
    asked = getattr(server, "requests", [])
    assert all(request.fields["max_tokens"] == 1 for request in asked) and len(asked) <= 3
    if case == "asleep":
        assert not asked


@pytest.mark.parametrize(
    "url",
    [
        *("http://127.0.0.1:9", "http://spark", "ftp://127.0.0.1:8000", "http://", "http://a:x", "http://ann:sesame@["),
    ],
)
def test_a_worker_that_is_not_there_is_not_reachable_for_a_cause(examined, url, expect_golden):
    expect_golden("doctor", f"nobody at {url}", examined(url=url))


@pytest.mark.parametrize("spelt", ["{}", " {}/v1/ ", "http://{}/v1"])
def test_a_url_is_understood_without_a_scheme_and_with_v1(examined, reachable, spelt, expect_golden):
    reachable.add(RecordingWorker())
    expect_golden("doctor", "a patched worker", examined(url=spelt.format("127.0.0.1:8000")))
    slow = {path for path, seconds in reachable.patience.items() if seconds != 5.0}
    assert slow == {"/v1/completions", "/v1/chat/completions"}  # which a cold engine answers late
    assert {reachable.patience[path] for path in slow} == {120.0} and reachable.connect_timeouts == {2.0}


def test_an_engine_core_without_the_patches_is_noticed_although_the_server_has_them(examined, reachable):
    """The engine's line goes once a step has shown that the engine core runs without the patches."""

    class Patched(RecordingWorker):
        async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
            self.more_metrics = "" if self.requests else engine_info()
            await super().__call__(scope, receive, send)

    reachable.add(Patched(patched=False))
    assert "cannot hit: patches are not live" in examined()


@pytest.mark.parametrize(
    ("seen", "flags"),
    [
        (FoundWay(Way.COMPOSE, "llm"), ()),
        (FoundWay(Way.COMPOSE, "llm"), ("--runs-as", "compose")),
        (FoundWay(Way.DOCKER), ("--runs-as", "systemd")),
        (FoundWay(Way.SPARK, image="vllm-node-b12x"), ()),
    ],
)
def test_cures_are_for_the_way_that_is_said_or_seen(examined, reachable, monkeypatch, seen, flags, expect_golden):
    monkeypatch.setattr(doctor, "find", lambda url: seen)
    reachable.add(RecordingWorker(patched=False))
    expect_golden("doctor", f"no plugin, {seen.way} {seen.name} {''.join(flags)}".strip(), examined(*flags))


@pytest.mark.parametrize(("seconds", "said"), [(0, "0 minutes"), (3599, "60 minutes"), (3600, "1.0 hours")])
def test_a_gateway_that_has_seen_nothing_says_so(seconds, said):
    nothing = dict.fromkeys(("waiting", "tokens_without_seconds", "cached_not_told"), 0)
    lines = shadow_lines({**nothing, "watched_seconds": seconds, "requests": {}, "lost": {}})
    assert lines == [f"lost in {said}, 0 requests judged:", "    nothing so far"]


BESIDE: dict[str, tuple[Server | None, tuple[str, ...]]] = {
    "a gateway beside it": (gateway(shadow=SHADOW), ("--gateway-key-file", "KEY")),
    "a gateway that is away": (None, ()),
    "a gateway without the page": (gateway(404), ()),
    "a gateway that wants a key": (gateway(401), ()),
    "a gateway that refuses the key": (gateway(403), ("--gateway-key-file", "KEY")),
    "a gateway that is none": (gateway(), ()),
    "a gateway of odd answers": (gateway(shadow=1), ()),
}


@pytest.mark.parametrize("case", BESIDE)
def test_beside_a_worker_a_gateways_losses_or_why_it_tells_none_are_printed(case, examined, reachable, expect_golden):
    server, flags = BESIDE[case]
    worker = RecordingWorker()
    reachable.add(worker)
    if server is not None:
        reachable.add(server, GATEWAY)
    expect_golden("doctor", case, examined("--gateway", "127.0.0.1:8080/v1", *flags))
    worker.status = 404
    assert "\ncannot hit: " in examined("--gateway", GATEWAY, *flags)  # whatever the gateway says


def test_a_url_that_is_none_shows_no_way(examined, monkeypatch):
    monkeypatch.setattr(doctor, "find", Mock(side_effect=ValueError))
    assert "is no URL" in examined(url="http://[")


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--worker x --runs-as lxc", "--runs-as"),
        ("--worker x --worker-api-key-file /nowhere", "worker_api_key_file"),
        ("--worker x --gateway-key-file /nowhere", "gateway_key_file"),
        ("", "--worker URL, or --recipe RECIPE"),
        ("--recipe /nowhere/a.yaml", "is no file, no command"),
    ],
)
def test_a_wrong_command_line_or_file_exits_with_2_and_one_line(flags, said, capsys):
    with pytest.raises(SystemExit) as ended:
        doctor.main(flags.split())
    (line,) = capsys.readouterr().err.splitlines()
    assert ended.value.code == 2 and line.startswith("seamark doctor: ") and said in line


@pytest.mark.parametrize(
    "recipe",
    [
        *("vllm serve Qwen3.6-27B", "vllm serve Qwen3.6-27B --mamba-cache-mode align", "vllm serve ./models/mine"),
        *("vllm serve Qwen3.6-27B --load-format b12x", "docker run vllm/vllm-openai:latest Qwen3.6-27B"),
    ],
)
def test_what_a_recipe_will_do_is_said_without_a_worker(recipe, monkeypatch, capsys, expect_golden):
    asked: list[str] = []
    monkeypatch.setattr(outlook, "image_version", lambda image: asked.append(image) or "0.30.1")
    status = doctor.main(["--recipe", recipe])
    expect_golden("doctor", recipe, f"exit status {status}\n{capsys.readouterr().out}")
    assert asked == (["vllm/vllm-openai:latest"] if "docker" in recipe else [])


def all_lines(own: Cures) -> str:
    release = release_line(own.found, "python3")
    return "\n".join((own.install(), own.update("0.3"), release, own.flag("--x", "why"), own.tools()))


@pytest.mark.parametrize("way", list(Way))
def test_each_way_has_lines_of_its_own_that_name_what_was_found(way, expect_golden):
    expect_golden("cures", f"{way}", all_lines(Cures(FoundWay(way))))
    expect_golden("cures", f"{way}, named", all_lines(Cures(FoundWay(way, "llm"))))


CONTAINER = "3f" * 32
DOCKER = f"0::/system.slice/docker-{CONTAINER}.scope\n"
USER = "0::/user.slice/user-1000.slice/user@1000.service/app.slice/terminal.scope\n"
SERVE = ("/opt/venv/bin/python3", "/opt/venv/bin/vllm", "serve", "m")


OWN = "vllm/vllm-openai"


def container(image: str = OWN, name: str = "/llm", **labels: str) -> dict[str, Any]:
    return {"Name": name, "Config": {"Image": image, "Labels": labels}}


@pytest.fixture
def around(tmp_path, monkeypatch) -> Callable[..., None]:
    """`around((arguments, control group), ...)`: a machine with these processes, and with what Docker says."""

    def around(*processes: tuple[tuple[str, ...], str], in_container: bool = False, inspected: Any = None) -> None:
        for number, (arguments, group) in enumerate(processes, 100):
            folder: Path = tmp_path / str(number)
            folder.mkdir()
            (folder / "cmdline").write_text("\0".join(arguments) + "\0")
            (folder / "cgroup").write_text(group)
        (tmp_path / "99").mkdir()  # a process that is not ours to look at
        monkeypatch.setattr(ways, "PROC", tmp_path)
        monkeypatch.setattr(ways, "MARKS", [tmp_path] if in_container else [])
        monkeypatch.setattr(ways, "docker_inspect", lambda name: inspected if name == CONTAINER else None)

    return around


@pytest.mark.parametrize(
    ("arguments", "group", "inspected", "found"),
    [
        (SERVE, USER, None, FoundWay(Way.PIP)),
        (("python", "-m", "vllm.entrypoints.openai.api_server"), USER, None, FoundWay(Way.PIP)),
        (("/venv/bin/python", "/venv/bin/seamark", "worker", "--port", "8000"), USER, None, FoundWay(Way.PIP)),
        (SERVE, "0::/system.slice/llm.service\n", None, FoundWay(Way.SYSTEMD, "llm.service")),
        (SERVE, DOCKER, None, FoundWay(Way.DOCKER)),  # no docker to be asked
        (SERVE, DOCKER, {}, FoundWay(Way.DOCKER)),  # what docker says may lack anything
        (SERVE, f"9:name=systemd:/docker/{CONTAINER}\n", container(), FoundWay(Way.DOCKER, "llm", OWN)),
        (SERVE, DOCKER, container(**{"com.docker.compose.service": "ai"}), FoundWay(Way.COMPOSE, "ai", OWN)),
        (SERVE, DOCKER, container("vllm-node:latest"), FoundWay(Way.SPARK, image="vllm-node:latest")),
        (SERVE, DOCKER, container(name="/vllm_node"), FoundWay(Way.SPARK, image=OWN)),
        (SERVE, "0::/kubepods.slice/kubepods-pod1.slice/cri-containerd-1.scope\n", None, FoundWay(Way.KUBERNETES)),
        (
            SERVE,
            f"0::/machine.slice/libpod-{CONTAINER}.scope/container\n",
            container(),
            FoundWay(Way.DOCKER, "llm", OWN),
        ),
        (SERVE, DOCKER, container("my/vllm-node"), FoundWay(Way.DOCKER, "llm", "my/vllm-node")),
        (("seamark", "serve"), USER, None, None),
        (("vim", "vllm", "notes"), USER, None, None),
    ],
)
def test_a_server_on_this_machine_is_known_by_its_control_group(around, arguments, group, inspected, found):
    around((arguments, group), inspected=inspected)
    assert find(URL) == found


def test_of_several_servers_the_one_at_the_port_counts_and_mapped_ports_of_one_way_too(around):
    first, second = ((*SERVE, "--port", "8001"), USER), ((*SERVE, "--port=8002"), "0::/system.slice/b.service\n")
    around(first, second)
    assert find("http://localhost:8001") == FoundWay(Way.PIP)
    assert find("http://[::1]:8002") == FoundWay(Way.SYSTEMD, "b.service")
    assert find("http://127.0.0.1:9000") is None  # either


@pytest.mark.parametrize(
    ("url", "found"),
    [
        ("http://worker:8000", FoundWay(Way.COMPOSE, "worker")),
        ("http://host.docker.internal:8000", None),
        ("http://worker-0.seamark-worker.seamark.svc:8000", FoundWay(Way.KUBERNETES)),
        (URL, None),  # a container does not see its own control group
    ],
)
def test_from_within_a_container_names_tell(around, url, found):
    around((SERVE, "0::/\n"), in_container=True)
    assert find(url) == found


def test_from_a_pod_it_is_kubernetes_and_a_machine_elsewhere_says_nothing(around, monkeypatch):
    around((SERVE, USER))
    assert find("http://spark:8000") is None
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    assert find("http://worker:8000") == FoundWay(Way.KUBERNETES)


FAILURES = [OSError("no docker"), subprocess.CalledProcessError(1, "docker"), subprocess.TimeoutExpired("docker", 5)]


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        ('[{"Name": "/a"}]', {"Name": "/a"}),
        *((answer, None) for answer in ("[]", "[1]", "{}", "no JSON", *FAILURES)),
    ],
    ids=repr,
)
def test_docker_is_asked_what_a_container_is(answer, told, monkeypatch):
    run = Mock(side_effect=[answer if isinstance(answer, Exception) else SimpleNamespace(stdout=answer)])
    monkeypatch.setattr(ways.subprocess, "run", run)
    assert docker_inspect("llm") == told
    (command,), given = run.call_args
    assert command == ("docker", "inspect", "--", "llm") and given.pop("timeout") > 0
    assert given == {"capture_output": True, "text": True, "check": True}


@pytest.mark.parametrize(
    ("labels", "variables", "version"),
    [
        ({"org.opencontainers.image.title": "vLLM", "org.opencontainers.image.version": "v0.33.0"}, [], "0.33.0"),
        (
            {"org.opencontainers.image.source": "https://github.com/vllm-project/vllm", "version": "0.32.1"},
            [],
            "0.32.1",
        ),
        ({"org.opencontainers.image.version": "22.04"}, [], ""),  # of Ubuntu, which it is built on
        ({"title": "vllm", "version": "nightly"}, None, ""),
        (None, ["PATH=/bin", "VLLM_VERSION=0.31.0+cu130"], "0.31.0+cu130"),
    ],
)
def test_an_image_tells_its_vllm_by_labels_and_nothing_in_it_is_run(labels, variables, version, monkeypatch):
    run = Mock(return_value=SimpleNamespace(stdout=json.dumps([{"Config": {"Labels": labels, "Env": variables}}])))
    monkeypatch.setattr(ways.subprocess, "run", run)
    assert ways.image_version("my image") == version
    assert run.call_args.args == (("docker", "image", "inspect", "--", "my image"),)


@pytest.mark.parametrize(
    ("python", "version"), [("{}/bin/python", "0.30.1+cu130"), ("{}/b/python", ""), ("python", "")]
)
def test_an_environment_tells_its_vllm_by_its_folders(python, version, tmp_path):
    for name in ("bin", "lib/python3.12/site-packages/vllm-0.30.1+cu130.dist-info", "other/b"):
        (tmp_path / name).mkdir(parents=True)
    assert ways.environment_version(python.format(tmp_path / "other" if "/b/" in python else tmp_path)) == version


@pytest.mark.parametrize(
    ("labels", "fine", "said"),
    [
        ('num_gpu_blocks="10",kv_cache_max_concurrency="1.1111111111111112"', True, "10 blocks: 1.1 requests of 1,024"),
        ('num_gpu_blocks="10",kv_cache_max_concurrency="1.0"', False, "10 blocks: 1.0 requests of 1,024"),
        ('num_gpu_blocks="10"', None, ""),
        ('num_gpu_blocks="None",kv_cache_max_concurrency="None"', None, ""),
    ],
)
def test_a_cache_with_no_room_for_the_longest_prompt_is_wrong(labels, fine, said):
    metrics = worker_metrics.read(f"vllm:cache_config_info{{{labels}}} 1.0\n")
    found = list(doctor._pool(metrics, 1024, Cures(FoundWay(Way.PIP))))
    assert [each.fine for each in found] == ([] if fine is None else [fine])
    assert said in "".join(each.text for each in found)
    assert ("--max-model-len N" in "".join(each.cure for each in found)) is (fine is False)
