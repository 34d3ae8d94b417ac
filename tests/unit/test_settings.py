"""Settings: four sources, one object, and an error that names the setting."""

from __future__ import annotations

import argparse

import pytest

from engine_patches import settings as engine_settings
from proxy.config_files import read_workers
from proxy.errors import SettingsError
from proxy.settings import PLUGIN_VARIABLES, PREFIX, Settings, add_arguments, load, unknown_variables


def parse(*arguments: str, environment: dict[str, str] | None = None) -> Settings:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return load(parser.parse_args(arguments), environment or {})


def test_the_command_line_goes_before_the_environment_before_the_file(tmp_path):
    config = tmp_path / "seamark.toml"
    config.write_text('worker = ["http://file:1"]\nport = 1\nload_slack = 1\nhost = "file"\n')
    environment = {PREFIX + "PORT": "2", PREFIX + "LOAD_SLACK": "2"}
    settings = parse("--config", str(config), "--port", "3", environment=environment)
    assert (settings.worker, settings.host, settings.load_slack, settings.port) == (("http://file:1",), "file", 2, 3)


def test_workers_come_several_ways_and_lose_their_v1():
    assert parse("--worker", "http://a:1/v1/", "--worker", "http://b:2").worker == ("http://a:1", "http://b:2")
    several = parse(environment={PREFIX + "WORKER": "http://a:1, http://b:2,http://a:1"})
    assert several.worker == ("http://a:1", "http://b:2")


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ((), "worker"),
        (("--worker", "localhost:8000"), "^worker: a worker's URL begins with http://"),
        (("--worker", "http://a", "--port", "70000"), "port"),
        (("--worker", "http://a", "--port", "x"), "port"),
        (("--worker", "http://a", "--load-slack", "-1"), "load_slack"),
        (("--worker", "http://a", "--config", "/nowhere.toml"), "config"),
        (("--worker", "http://a", "--redis", "localhost:6379"), "redis"),
        (("--worker", "http://a", "--redis", "redis://"), "redis"),
        (("--worker", "http://a", "--redis", "redis://a:99999"), "redis"),
        (("--worker", "http://a", "--redis", "redis://a/first"), "redis"),
        (("--worker", "http://a", "--redis", "redis://a?socket_timeout=60"), "redis"),
    ],
)
def test_a_wrong_value_is_refused_with_the_settings_name(arguments, named):
    with pytest.raises(SettingsError, match=named):
        parse(*arguments)


def test_an_unknown_name_in_the_file_is_refused(tmp_path):
    config = tmp_path / "seamark.toml"
    config.write_text('worker = ["http://a"]\nrediss = "redis://:hunter2@a"\n')
    with pytest.raises(SettingsError) as refused:
        parse("--config", str(config))
    assert str(refused.value) == f"config: {config}: no setting 'rediss'; did you mean redis?"


@pytest.mark.parametrize(
    ("name", "meant"), [("prot", "port"), ("load-slack", "load_slack"), ("Workers_File", "workers_file"), ("zzz", "")]
)
def test_a_wrong_name_is_answered_with_the_settings_that_read_like_it(tmp_path, name, meant):
    config = tmp_path / "seamark.toml"
    config.write_text(f'worker = ["http://a"]\n{name} = 1\nport = "x"\n')
    with pytest.raises(SettingsError) as refused:
        parse("--config", str(config))
    words = str(refused.value)
    assert f"no setting {name!r}" in words and "Extra inputs" not in words
    assert ("did you mean" in words) == bool(meant) and (f"did you mean {meant}" in words or not meant)


def test_a_variable_that_nothing_reads_is_named_without_its_value():
    meant = {PREFIX + "PROT": "hunter2", PREFIX + "ZZZ": "hunter2", PREFIX + "WORKER_PORT": "8000"}
    prot, worker_port, zzz = unknown_variables(meant)
    assert prot == "SEAMARK_PROT is ignored: no setting 'prot'; did you mean port?"
    assert zzz == "SEAMARK_ZZZ is ignored: no setting 'zzz'" and "SEAMARK_WORKER_PORT" in worker_port
    assert parse("--worker", "http://a", environment=meant).port == 8080


def test_variables_of_the_gateway_the_plugin_and_of_kubernetes_are_no_mistakes():
    own = {PREFIX + name.upper(): "" for name in Settings.model_fields} | {PREFIX + "CONFIG": ""}
    named = {value for value in vars(engine_settings).values() if isinstance(value, str) and value.startswith(PREFIX)}
    plugins = named - {PREFIX}
    assert plugins == PLUGIN_VARIABLES
    services = {
        "SEAMARK_SERVICE_HOST": "10.0.0.1",
        "SEAMARK_SERVICE_PORT_HTTP": "8080",
        "SEAMARK_GATEWAY_SERVICE_PORT": "8080",
        "SEAMARK_GATEWAY_PORT": "tcp://10.0.0.1:8080",
        "SEAMARK_PORT_8080_TCP_ADDR": "10.0.0.1",
    }
    assert not unknown_variables({**own, **dict.fromkeys(plugins, "1"), **services, "PATH": "/bin"})


@pytest.mark.parametrize("url", ["redis://a", "rediss://user:word@a:1/3?ssl_cert_reqs=none", "unix:///run/redis?db=1"])
def test_a_redis_is_named_by_its_url(url):
    assert parse("--worker", "http://a", "--redis", url).redis == url
    assert parse("--worker", "http://a", environment={PREFIX + "REDIS": url}).redis == url
    assert parse("--worker", "http://a", environment={PREFIX + "REDIS": ""}).redis is None


@pytest.mark.parametrize("url", ["rediss://user:hunter2@a:port", "http://u:hunter2@a", "redis://:hunter2@a?x=hunter2"])
def test_a_password_is_not_told_where_its_url_is_refused(url):
    with pytest.raises(SettingsError, match="redis") as refused:
        parse("--worker", "http://a", "--redis", url)
    assert "hunter2" not in str(refused.value)
    assert "hunter2" not in repr(parse("--worker", "http://a", "--redis", "redis://:hunter2@a"))


@pytest.mark.parametrize("content", ["worker = 5", "worker = [5]", "rewrite = 5", "rewrite = ['x']", "port = []"])
def test_a_wrong_type_in_the_file_is_refused_with_the_settings_name(tmp_path, content):
    config = tmp_path / "seamark.toml"
    config.write_text(f'workers_file = "workers.toml"\n{content}\n')
    with pytest.raises(SettingsError, match=f"^{content.partition(' ')[0]}"):
        parse("--config", str(config))


def test_the_file_is_named_by_a_variable_too(tmp_path):
    config = tmp_path / "seamark.toml"
    config.write_text('worker = ["http://file:1"]\nrewrite = []\n')
    settings = parse(environment={PREFIX + "CONFIG": str(config), PREFIX + "PORT": ""})
    assert (settings.worker, settings.rewrite, settings.port) == (("http://file:1",), (), 8080)


def test_an_empty_variable_counts_for_rewrite_rules_alone():
    empty = {PREFIX + name.upper(): "" for name in Settings.model_fields}
    settings = parse("--worker", "http://a", environment=empty)
    assert settings == Settings(worker=("http://a",), rewrite=())


@pytest.mark.parametrize("value", ["tools_sorted,billing_header", " tools_sorted , billing_header ,"])
def test_rewrite_rules_are_listed_with_commas(value):
    assert parse("--worker", "http://a", "--rewrite", value).rewrite == ("tools_sorted", "billing_header")
    with pytest.raises(SettingsError, match=r"rewrite.*billing_header.*'nonsense'"):
        parse("--worker", "http://a", "--rewrite", "nonsense")


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


@pytest.mark.parametrize(
    "url", ["http://user:sesame@ho st:1", "ftp://user:sesame@host", "http://user:sesame@host:99999"]
)
def test_credentials_of_a_worker_are_not_told_where_its_url_is_refused(url, tmp_path):
    with pytest.raises(SettingsError) as refused:
        parse("--worker", url)
    assert "worker" in str(refused.value) and "sesame" not in str(refused.value)
    file = tmp_path / "workers.toml"
    file.write_text(f'[[worker]]\nurl = "{url}"\n')
    with pytest.raises(SettingsError) as refused:
        read_workers(file)
    assert "url" in str(refused.value) and "sesame" not in str(refused.value)
    assert "sesame" not in repr(parse("--worker", "http://user:sesame@host"))
