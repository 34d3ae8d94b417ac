"""Settings: four sources, one object, and an error that names the setting."""

from __future__ import annotations

import argparse

import pytest

from proxy.errors import SettingsError
from proxy.settings import PREFIX, Settings, add_arguments, load


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
        (("--worker", "localhost:8000"), "worker"),
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
    with pytest.raises(SettingsError, match="rediss") as refused:
        parse("--config", str(config))
    assert "hunter2" not in str(refused.value)


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
