"""requirements.lock holds what pyproject.toml asks for, and names no host."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
WANTED = [*PROJECT["dependencies"], *(each for extra in PROJECT["optional-dependencies"].values() for each in extra)]

LOCKED = [Requirement(line) for line in (ROOT / "requirements.lock").read_text().splitlines()]


@pytest.mark.parametrize("wanted", WANTED)
def test_what_is_asked_for_is_locked_in_a_version_that_will_do(wanted):
    requirement = Requirement(wanted)
    name = canonicalize_name(requirement.name)
    versions = [each.specifier for each in LOCKED if canonicalize_name(each.name) == name]
    assert versions
    for version in versions:
        assert requirement.specifier.contains(str(version).removeprefix("=="), prereleases=True)


def test_every_line_is_one_version_from_no_named_host():
    assert all(re.fullmatch(r"==[^,*]+", str(each.specifier)) and each.url is None for each in LOCKED)
