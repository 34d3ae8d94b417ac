"""Settings and files an operator writes: complaints name setting, file and field, and never show a value."""

from __future__ import annotations

import argparse
import os
import re
import socket
from codecs import BOM_UTF8
from functools import partial
from pathlib import Path

import pytest

from proxy.config_files import (
    MOST_BYTES,
    WatchedFile,
    read_secret,
    read_toml,
    service_url,
    worker_url,
    workers_in,
)
from proxy.errors import SettingsError
from proxy.settings import PREFIX, Settings, add_arguments, load, unknown_variables


def socket_at(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(str(path))


@pytest.mark.parametrize(
    "make",
    [
        os.mkfifo,
        socket_at,
        Path.mkdir,
        lambda path: path.symlink_to("/dev/zero"),
        lambda path: (os.mkfifo(path.with_name("pipe")), path.symlink_to("pipe")),
    ],
    ids=["FIFO", "socket", "folder", "device", "link"],
)
def test_what_is_no_regular_file_is_refused_and_never_waited_for(tmp_path, make):
    path = tmp_path / "file"
    make(path)
    for read in (read_toml, read_secret):
        with pytest.raises(SettingsError, match=rf"^some_setting: {path} is no regular file"):
            read("some_setting", path)


def test_a_link_to_a_file_is_read_and_one_that_is_too_large_or_has_no_path_is_not(tmp_path):
    path = tmp_path / "link"
    (tmp_path / "file").write_text("count = 1")
    path.symlink_to("file")
    assert read_toml("some_setting", path) == {"count": 1}
    with (tmp_path / "file").open("ab") as opened:
        opened.truncate(MOST_BYTES + 1)
    with pytest.raises(SettingsError, match="more than"):
        read_toml("some_setting", path)
    with pytest.raises(SettingsError, match="some_setting"):
        read_toml("some_setting", Path("a\0b"))


def test_a_key_loses_its_line_end_and_a_mark_before_it_and_must_be_alone_in_its_file(tmp_path):
    path = tmp_path / "secret"
    path.write_bytes(BOM_UTF8 + b"  hunter2\n")
    assert read_secret("key_file", path) == "hunter2"
    for content in (b" \n", BOM_UTF8, b"\xff\xfe", b"hunter2\n# comment", b'"hunter2"\n', b"hunter\xc2\xa02"):
        path.write_bytes(content)
        with pytest.raises(SettingsError, match=rf"^key_file: {path} (?!.*hunter2)"):
            read_secret("key_file", path)


@pytest.mark.parametrize("error", [ValueError("hunter2"), RecursionError(), MemoryError(), KeyError("hunter2")])
def test_whatever_its_reader_raises_a_watched_file_counts_as_not_read(tmp_path, caplog, error):
    path = tmp_path / "file.toml"
    path.write_text("count = 1")

    def read(raw, where):
        if b"2" in raw:
            raise error
        return 1

    watched = WatchedFile("some_setting", path, read, "")
    path.write_text("count = 22")
    assert [watched.refresh(), watched.is_current, watched.value] == [False, False, 1]
    assert str(path) in caplog.text and "hunter2" not in caplog.text
    with pytest.raises(SettingsError, match="cannot be used"):
        WatchedFile("some_setting", path, read, "")


TWO = b'[[worker]]\nurl = "http://a"\n[[worker]]\nurl = "http://b"\nmax_inflight = 128\n# end\n'


@pytest.mark.parametrize(
    "change",
    [
        Path.unlink,
        lambda path: (path.unlink(), os.mkfifo(path)),
        *(partial(Path.write_bytes, data=data) for data in (b"", b"\n", b"# none\n", b"\0" * 99, BOM_UTF8)),
        *(partial(Path.write_bytes, data=TWO[:end]) for end in range(len(TWO)) if TWO[end] != 10 != TWO[end - 1]),
    ],
)
def test_a_watched_file_that_is_gone_or_says_nothing_or_ends_within_a_line_stops_nothing(tmp_path, caplog, change):
    path = tmp_path / "file.toml"
    path.write_bytes(TWO)
    watched = WatchedFile("workers_file", path, workers_in, "")
    change(path)
    assert not watched.refresh() and not watched.is_current
    assert watched.value == (("http://a", None), ("http://b", 128)) and len(caplog.messages) == 1
    path.unlink(missing_ok=True)
    for said, workers in ((BOM_UTF8 + TWO[:28] + b"\n", (("http://a", None),)), (b"worker = []\n", ())):
        path.write_bytes(said)
        assert watched.refresh() and watched.value == workers


@pytest.mark.parametrize("end", ["\nSEAMARK_API_KEYS=/tmp/k", "\r", "\tb", " b", "\x1b[2J", "\u2028b", "\x00"])
def test_an_address_with_a_line_of_its_own_in_it_is_none(end):
    with pytest.raises(ValueError, match="no spaces, line ends"):
        worker_url(f"http://a{end}/")
    with pytest.raises(ValueError, match="no spaces, line ends"):
        service_url(f"a{end}:8000")


def test_a_service_that_is_no_name_with_a_port_is_refused():
    refused = {
        "http://a": "NAME:PORT",
        "https://a:1": "https is not",
        "me:word@a:1": "no credentials",
        "a:99999": "URL|port",
    }
    for name, said in refused.items():
        with pytest.raises(ValueError, match=said):
            service_url(name)


def parse(*arguments: str, environment: dict[str, str] | None = None) -> Settings:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return load(parser.parse_args(arguments), environment or {})


NO_REDIS = ("localhost:6379", "redis:///1", "redis://a:99999", "redis://a/first", "redis://a/1/2", "redis://a/-1")


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ((), "worker"),
        (("--worker", "localhost:8000"), "^worker: a worker's URL begins with http://"),
        (("--worker", "http://a/v1/chat/completions"), "^worker: leave out /v1/chat/completions: "),
        (("--worker", "http://a", "--response-cache-models", '"m"'), "^response_cache_models: leave the quotes out"),
        (("--worker", "http://a", "--port", "70000"), "port"),
        (("--worker", "http://a", "--load-slack", "-1"), "load_slack"),
        (("--worker", "http://a", "--config", "/nowhere.toml"), "config"),
        *(
            (("--worker", "http://a", "--redis", url), "redis")
            for url in (*NO_REDIS, "redis://a?db=1&timeout=1", "unix:///")
        ),
        *(
            (("--worker", "http://a", "--otlp-traces-endpoint", url), "^otlp_traces_endpoint: the URL must read http")
            for url in ("collector:4318", "grpc://collector:4317", "http://", "http:///v1/traces")
        ),
    ],
)
def test_a_wrong_value_is_refused_with_the_settings_name(arguments, named):
    with pytest.raises(SettingsError, match=named):
        parse(*arguments)


@pytest.mark.parametrize(("name", "meant"), [("rediss", "redis"), ("load-slack", "load_slack"), ("zzz", "")])
def test_a_wrong_name_is_answered_with_the_settings_that_read_like_it_and_without_its_value(tmp_path, name, meant):
    config = tmp_path / "seamark.toml"
    config.write_text(f'worker = ["http://a"]\n{name} = "redis://:hunter2@a"\n')
    with pytest.raises(SettingsError) as refused:
        parse("--config", str(config))
    did_you = f"; did you mean {meant}?" if meant else ""
    assert str(refused.value) == f"config: {config}: no setting {name!r}{did_you}"


def test_a_variable_that_nothing_reads_is_named_without_its_value_and_a_port_of_a_service_is_no_setting():
    meant = {PREFIX + "PROT": "hunter2", PREFIX + "ZZZ": "hunter2", PREFIX + "WORKER_PORT": "8000"}
    made = {f"{PREFIX}{name}PORT": "tcp://10.96.7.7:80" for name in ("", "ADMIN_", "ZZZ_", "80_TCP_")}
    admin, port, prot, worker_port, zzz = unknown_variables(meant | made)
    assert prot == "SEAMARK_PROT is ignored: no setting 'prot'; did you mean port?"
    assert zzz == "SEAMARK_ZZZ is ignored: no setting 'zzz'" and "SEAMARK_WORKER_PORT" in worker_port
    assert re.match("SEAMARK_ADMIN_PORT .*Kubernetes", admin) and re.match("SEAMARK_PORT .*Kubernetes", port)
    settings = parse("--worker", "http://a", environment=meant | made)
    assert (settings.port, settings.admin_port) == (8080, None)


@pytest.mark.parametrize("content", ["worker = 5", "worker = [5]", "rewrite = ['x']"])
def test_a_wrong_type_in_the_file_is_refused_with_the_settings_name(tmp_path, content):
    config = tmp_path / "seamark.toml"
    config.write_text(f'workers_file = "workers.toml"\n{content}\n')
    with pytest.raises(SettingsError, match=f"^{content.partition(' ')[0]}"):
        parse("--config", str(config))


@pytest.mark.parametrize(
    ("source", "on"), [(("--shadow",), True), (("--shadow", "true"), True), (("--shadow", "false"), False)]
)
def test_shadow_implies_what_changes_nothing_unless_it_is_said(source, on):
    settings = parse("--worker", "http://a", *source)
    changing = (settings.ask_usage, settings.rewrite, settings.heartbeat, settings.self_check_interval)
    assert changing == ((False, (), 0, 0) if on else (True, ("billing_header",), 15, 30))
    assert parse("--worker", "http://a", *source, "--heartbeat", "7", environment={}).heartbeat == 7
    by_variable = parse("--worker", "http://a", environment={PREFIX + "SHADOW": "1", PREFIX + "ASK_USAGE": "true"})
    assert by_variable.shadow and by_variable.ask_usage and not by_variable.heartbeat
    with pytest.raises(SettingsError, match="shadow"):
        parse("--worker", "http://a", "--shadow", "perhaps")


def of(**values: object) -> Settings:
    return Settings(worker=("http://a",), **values)


MANY = 10**12

# The least and the most that is taken of a number, and the nearest values that are refused; of others 0 is refused.
OR_NONE = (0, MANY, (-0.001, -1))
NUMBERS: dict[str, tuple[int, int, tuple[float, ...]]] = {
    **dict.fromkeys(("workers_dns_keep", "min_body_rate", "heartbeat", "stop_delay", "replay_seconds"), OR_NONE),
    **dict.fromkeys(("self_check_interval", "text_bytes", "response_cache", "load_slack", "max_inflight"), OR_NONE),
    **dict.fromkeys(("max_queue", "max_collected_bytes", "max_connections", "max_boundary_values"), OR_NONE),
    **dict.fromkeys(("port", "admin_port"), (0, 65535, (-1, 65536))),
    "max_json_depth": (1, 900, (0, 901)),
    "self_check_tokens": (256, MANY, (255,)),
}


def test_a_number_has_its_bounds():  # its default is the documents' own: test_readme
    numbers = [name for name, field in Settings.model_fields.items() if field.annotation in (int, float, int | None)]
    assert len(numbers) > 30
    for name in numbers:
        least, most, wrong = NUMBERS.get(name, (1, MANY, (0,)))
        for value in (least, most):
            assert getattr(of(**{name: value}), name) == value
        for value in wrong:
            with pytest.raises(ValueError, match=name):
                of(**{name: value})


def test_the_command_line_goes_before_the_environment_before_the_file(tmp_path):
    config = tmp_path / "seamark.toml"
    config.write_text('worker = ["http://file:1"]\nport = 1\nload_slack = 1\nmax_queue = 1\n')
    environment = {PREFIX + "PORT": "2", PREFIX + "LOAD_SLACK": "2"}
    settings = parse("--config", str(config), "--port", "3", environment=environment)
    assert (settings.port, settings.load_slack, settings.max_queue, settings.worker) == (3, 2, 1, ("http://file:1",))
    settings = parse(environment={PREFIX + "CONFIG": str(config), PREFIX + "PORT": "", PREFIX + "LOAD_SLACK": "2"})
    assert (settings.port, settings.load_slack, settings.max_queue) == (1, 2, 1)


@pytest.mark.parametrize("url", ["http://u:hunter2@ho st:1", "ftp://u:hunter2@host", "redis://u:hunter2@a?x=hunter2"])
def test_credentials_are_not_told_where_their_url_is_refused(url, tmp_path):
    file = tmp_path / "workers.toml"
    file.write_text(f'[[worker]]\nurl = "{url}"\n')
    flags = (("--worker", url), ("--worker", "http://a", "--redis", url))
    for reading in (
        *(partial(parse, *each) for each in flags),
        partial(WatchedFile, "workers_file", file, workers_in, ""),
    ):
        with pytest.raises(SettingsError) as refused:
            reading()
        assert "hunter2" not in str(refused.value)


@pytest.mark.parametrize("name", ["worker", "prefill_worker", "otlp_traces_endpoint", "redis"])
def test_what_may_hold_a_password_is_not_in_the_settings_text(name):
    value = "redis://u:hunter2@a" if name == "redis" else "http://u:hunter2@a"
    settings = Settings(**{"worker": ("http://b",), name: value})
    assert getattr(settings, name) and "hunter2" not in repr(settings) and f"{name}=" not in repr(settings)


@pytest.mark.parametrize(
    ("name", "url"),
    [
        *(("redis", url) for url in (" redis://a:1 ", "redis://a:65535/0", "redis://a/", "redis://:word@a/15/")),
        *(("redis", "unix:///run/redis.sock?db=1"), ("redis", None), ("otlp_traces_endpoint", "https://a")),
        ("otlp_traces_endpoint", " http://collector:4318/v1/traces "),
    ],
)
def test_a_redis_and_a_collector_are_named_by_their_urls(name, url):
    assert getattr(of(**{name: url}), name) == (url.strip() if url else None)
    assert getattr(parse("--worker", "http://a", environment={PREFIX + name.upper(): ""}), name) is None


def test_a_sidecar_has_one_worker_and_nothing_that_others_share():
    assert of(sidecar=True).sidecar
    for workers in ((), ("http://a", "http://b")):
        with pytest.raises(ValueError, match="it stands beside one vLLM"):
            Settings(worker=workers, sidecar=True)
    shared = {"workers_file": "f", "workers_dns": "a:1", "prefill_worker": "http://b", "redis": "redis://a"}
    for name, value in shared.items():
        assert getattr(of(**{name: value}), name)
        with pytest.raises(ValueError, match=f"leave out {name}"):
            of(sidecar=True, **{name: value})


def test_a_worker_computes_prompts_for_others_or_answers_and_not_both():
    assert Settings(worker=" ,http://a,", prefill_worker="http://b/v1,http://b").prefill_worker == ("http://b",)
    with pytest.raises(SettingsError, match=r"^prefill_worker: it names a worker that worker names, too"):
        parse("--worker", "http://a", "--worker", "http://b", "--prefill-worker", "http://b/v1")


def test_names_of_services_are_listed():
    assert Settings(workers_dns="a:1,, b:2 ,a:1").workers_dns == ("http://a:1", "http://b:2")
    for value, said in ({"workers_dns": 5}, "NAME:PORT"), ({"worker": " ,"}, "a URL"):
        with pytest.raises(ValueError, match=f"{said} or a list of these"):
            Settings(**value)
