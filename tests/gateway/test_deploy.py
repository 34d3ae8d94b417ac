"""The files of deploy/ say what the code knows. That they run is `make test-deploy`: it wants a container engine."""

from __future__ import annotations

import configparser
import re
import shutil
import subprocess
import sys
from itertools import chain

import pytest

from engine_patches import plugin
from engine_patches import settings as engine_settings
from proxy.settings import Settings
from tests.deploy.compose_files import BASE, DEPLOY, EVERY_WAY, example, read

FILES = sorted({name for way in EVERY_WAY for name in way})

GATEWAYS = {f"SEAMARK_{name.upper()}" for name in Settings.model_fields} | {"SEAMARK_CONFIG"}

TEXTS = {value for value in vars(engine_settings).values() if isinstance(value, str)}

ENGINES = {text for text in TEXTS - {engine_settings.PREFIX} if text.startswith(engine_settings.PREFIX)}

ENGINES |= {plugin.MODE_VARIABLE}

# Where the container listens is fixed; what of it is published is not.
FIXED = {"SEAMARK_HOST", "SEAMARK_PORT", "SEAMARK_ADMIN_HOST", "SEAMARK_ADMIN_PORT"}

# Read by Compose itself.
COMPOSES = {"COMPOSE_FILE", "COMPOSE_PROFILES"}


def defaults_in(name: str) -> dict[str, str | None]:
    """Variables that a compose file interpolates, with their defaults; None if there is none."""
    found = re.findall(r"\$\{([A-Z0-9_]+)(?::([-?])([^}]*))?\}", (DEPLOY / name).read_text())
    return {variable: default if kind == "-" else None for variable, kind, default in reversed(found)}


def passed_through(name: str) -> set[str]:
    """Variables that a compose file hands to a container or a build as they are."""
    handed = set()
    for service in read(name)["services"].values():
        for values in (service.get("environment") or {}, (service.get("build") or {}).get("args") or {}):
            handed |= {variable for variable, value in values.items() if value is None}
    return handed


def test_every_variable_is_in_the_example_and_nothing_else_is():
    used = set(chain.from_iterable(set(defaults_in(name)) | passed_through(name) for name in FILES))
    assert set(example()) == used | GATEWAYS | ENGINES | COMPOSES


@pytest.mark.parametrize("name", FILES)
def test_the_example_shows_the_defaults_of_the_compose_files(name):
    shown = example()
    for variable, default in defaults_in(name).items():
        # An overlay may have another model, or another worker, in mind.
        if default is not None and not (variable == "MODEL_FILE" and name != BASE) and variable not in GATEWAYS:
            assert shown[variable] == default, variable


@pytest.mark.parametrize("field", Settings.model_fields)
def test_the_example_shows_the_defaults_of_the_gateway(field):
    shown, default = example()[f"SEAMARK_{field.upper()}"], Settings.model_fields[field].get_default()
    if shown == "":
        assert default in (None, ())
    else:
        settings = Settings(**{"worker": "http://a", field: shown})
        assert getattr(settings, field) == default


def test_each_half_is_given_its_own_settings_and_no_secrets_of_the_other():
    services = read(BASE)["services"]
    assert {name for name in services["gateway"]["environment"] if name.startswith("SEAMARK_")} == GATEWAYS
    assert {name for name in services["worker"]["environment"] if name.startswith("SEAMARK_")} == ENGINES
    assert set(services["gateway"]["environment"]) == GATEWAYS
    assert {
        name for name, value in services["gateway"]["environment"].items() if value and "$" not in str(value)
    } == FIXED
    assert not any("env_file" in service for service in services.values())


def test_no_default_of_the_plugin_is_shown_wrong(monkeypatch):
    shown = example()
    for name in ENGINES:
        monkeypatch.delenv(name, raising=False)
    assert shown[engine_settings.FAN_OUT] == str(int(engine_settings.fan_out()))
    assert float(shown[engine_settings.STATE_SHARE]) == engine_settings.state_share()
    assert float(shown[engine_settings.PIN_SHARE]) == engine_settings.pin_share()
    assert shown[plugin.MODE_VARIABLE] == plugin.FULL and shown[engine_settings.CHUNK_ENDS] == ""


@pytest.mark.parametrize("name", FILES)
def test_nothing_is_published_to_the_network_unasked(name):
    for service in read(name)["services"].values():
        for port in service.get("ports", ()):
            assert re.match(r"127\.0\.0\.1:|\$\{(BIND|WORKER_BIND):-127\.0\.0\.1\}:", port), port


def test_the_gateway_and_redis_can_do_little():
    services = read(BASE)["services"]
    for service in (services["gateway"], services["redis"]):
        assert service["read_only"] and service["cap_drop"] == ["ALL"] and "tmpfs" in service
        assert service["security_opt"] == ["no-new-privileges:true"] and "privileged" not in service
    assert "USER 65532:65532" in (DEPLOY / "gateway.Dockerfile").read_text()


@pytest.mark.parametrize("half", ["gateway", "worker"])
def test_an_image_is_built_from_its_half_alone(half):
    text = (DEPLOY / f"{half}.Dockerfile").read_text()
    other = {"gateway": "engine_patches", "worker": "proxy"}[half]
    assert not re.search(rf"^COPY.*\b{other}\b", text, re.MULTILINE)
    # A frontend named there would be fetched from a registry.
    assert "syntax=" not in text
    copied = set(" ".join(re.findall(r"^COPY (?!--from)(.+) \S+$", text, re.MULTILINE)).split())
    admitted = (DEPLOY / f"{half}.Dockerfile.dockerignore").read_text().splitlines()
    assert admitted[0] == "*" and copied <= {line[1:] for line in admitted if line.startswith("!")}


def test_the_systemd_unit_is_sound(tmp_path):
    unit = DEPLOY / "systemd" / "seamark-gateway.service"
    parser = configparser.RawConfigParser(strict=False)
    parser.optionxform = str
    parser.read(unit)
    assert parser["Service"]["ExecStart"] == "/opt/seamark/bin/seamark serve"
    taken = [Settings.model_fields[name].get_default() for name in ("stop_delay", "drain_timeout")]
    assert int(parser["Service"]["TimeoutStopSec"]) > sum(taken)
    if shutil.which("systemd-analyze"):
        # It looks whether the program is there.
        copy = tmp_path / unit.name
        copy.write_text(unit.read_text().replace("/opt/seamark/bin/seamark", f'"{sys.executable}"'))
        verified = subprocess.run(["systemd-analyze", "verify", str(copy)], capture_output=True, text=True)
        assert verified.returncode == 0 and unit.name not in verified.stderr, verified.stderr
