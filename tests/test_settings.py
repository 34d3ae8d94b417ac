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
    ],
)
def test_a_wrong_value_is_refused_with_the_settings_name(arguments, named):
    with pytest.raises(SettingsError, match=named):
        parse(*arguments)


def test_an_unknown_name_in_the_file_is_refused(tmp_path):
    config = tmp_path / "seamark.toml"
    config.write_text('worker = ["http://a"]\nprot = 1\n')
    with pytest.raises(SettingsError, match="prot"):
        parse("--config", str(config))
