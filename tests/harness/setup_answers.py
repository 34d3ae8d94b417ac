"""What `seamark setup` is answered in tests, of every kind, and the files that have to come of it."""

from __future__ import annotations

from pathlib import Path

from proxy.commands import setup
from tests.deploy.compose_files import OF_THE_USER

WORKER = ("--worker", "http://127.0.0.1:8000/v1")

# In the shapes in which they are published: one small file each, in words of our own.
RECIPES = Path(__file__).parents[1] / "data" / "recipes"

# What make-mod.sh wants of a checkout, in the home folder.
SPARK = "spark-vllm-docker"

SECOND = ("--worker", f"http://{OF_THE_USER['SECOND_SPARK']}:8000")

# The flags, and the files.
ANSWERS: dict[str, tuple[tuple[str, ...], set[str]]] = {
    "pip": (("--way", "pip", "--model", "a/B c"), {"seamark.toml", "gateway.sh", "worker.sh"}),
    "pip, vLLM runs": (("--way", "pip", *WORKER, *SECOND), {"seamark.toml", "gateway.sh"}),
    "compose": (("--way", "compose", "--model", "nemotron-3-super"), {"compose.sh", "seamark.env"}),
    "compose, own model": (
        ("--way", "compose", "--model", "a/B"),
        {"compose.sh", "seamark.env", "compose.model.yaml", "models/model.yaml"},
    ),
    "compose, CPU": (("--way", "compose", "--cpu"), {"compose.sh", "seamark.env"}),
    "compose, two": (("--way", "compose", "--model", "qwen3.6-35b", *SECOND), {"compose.sh", "seamark.env"}),
    "beside": (("--way", "compose-beside", *WORKER), {"compose.sh", "seamark.env"}),
    "spark": (
        ("--way", "spark-vllm-docker", "--model", "a/B"),
        {"start.sh", "gateway.sh", "seamark.toml", "seamark-b.yaml"},
    ),
    "spark, our recipe": (
        ("--way", "spark-vllm-docker", "--model", "nvidia/NVIDIA-Nemotron-3-Super-120B-A12B-NVFP4"),
        {"start.sh", "gateway.sh", "seamark.toml", "seamark-nemotron-3-super.yaml"},
    ),
    "spark, our recipe for two": (
        ("--way", "spark-vllm-docker", "--model", "glm-5.3-flash"),
        {"start.sh", "gateway.sh", "seamark.toml", "seamark-glm-5.3-flash.yaml"},
    ),
    "systemd": (
        ("--way", "systemd", *WORKER),
        {"seamark-gateway.service", "seamark.env", "install.sh", "remove.sh"},
    ),
    "kubernetes": (
        ("--way", "kubernetes", "--workers", "2", "--model", "a/B", "--registry", "registry.example/us"),
        {"values.yaml", "images.sh"},
    ),
    "kubernetes, our model": (("--way", "kubernetes", "--model", "qwen3.6-35b"), {"values.yaml", "images.sh"}),
    "kubernetes, vLLM runs": (
        ("--way", "kubernetes", "--worker", "http://vllm.models:8000"),
        {"values.yaml", "images.sh"},
    ),
}


def written(folder: Path, name: str) -> Path:
    """The files of one kind of answer, in a folder of their own."""
    out = folder / "out"
    assert setup.main([*ANSWERS[name][0], "--out", str(out)]) == 0
    return out
