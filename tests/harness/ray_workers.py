"""vLLM plugins for test engines only: workers that Ray starts on a CPU, and what they see of Seamark's settings.

vLLM places workers where Ray counts accelerators, and its CPU platform names none. Here a worker takes one of the GPUs
that a Ray without any is told to have.
"""

from __future__ import annotations

import os

from engine_patches.settings import PREFIX

SETTINGS = "tests: settings here:"  # in the output of each process that loads plugins


def platform() -> str:
    """The platform plugin: the name of a class."""
    return "tests.harness.ray_platform.CpuOfRay"


def say_settings() -> None:
    """The other plugin."""
    found = [f"{name}={value}" for name, value in sorted(os.environ.items()) if name.startswith(PREFIX)]
    print(SETTINGS, *found, flush=True)
