"""The versions of vLLM that the plugin knows, the fork that it does not, and what an image's name says of either."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

# As the plugin's settings have them.
SUPPORTED, IMAGE = "0.31 to 0.33", "vllm/vllm-openai:v0.33.0"

FIRST, LAST = (0, 31), (0, 33)

RELEASE = IMAGE.rpartition(":v")[2]  # to take in place of another version

# An image of vLLM's own: repository, version (none with `latest`, `nightly` or a model's name), variant (`-cu130`).
_OWN = re.compile(
    r"((?:[\w.:-]+/)*vllm-openai(?:-\w+)?)"
    r"(?::(?:v(?P<version>\d{1,6}\.\d{1,6}(?:\.\d{1,6})?)[\w.]{0,64}(-[\w.-]{1,128})?|[\w.-]{1,128}?(-cu\d+)?))?(?:@.*)?",
    re.ASCII,
)
_SPARK = re.compile(r"vllm-node-(?P<version>\d{1,6}\.\d{1,6}\.\d{1,6})", re.ASCII)  # as the doctor's cure names it

# What tells the B12X fork of vLLM: parts of an image's name or of a flag of its build, and flags of its `vllm serve`
# that vLLM's own does not have, with a value where vLLM has the flag.
FORK_SIGNS = (
    *("b12x", "voipmonitor/vllm", "localinferencelab/vllm", "local-inference-lab/vllm"),
    *("--load-format b12x", "--kda-prefill-backend b12x", "--gdn-decode-kernel", "--recurrent-checkpoint-policy"),
    *("--recurrent-page-size", "--prefill-compute-share", "--max-parallel-prefills", "--fairness-engine"),
    *("--max-num-prefill-tokens-per-step", "--decode-prefill-min-decode-steps", "--decode-prefill-max-wait-ms"),
)

FORK = "the plugin leaves the B12X fork of vLLM untouched"
FORK_ALONE = (
    "alone the fork keeps a state at the end of the system prompt, of the prompt and of the answer for "
    "Qwen3.8-Flash-Next and GLM-5.3-Flash, none for a document in a user's message, several places of a prompt or "
    "equal prompts at once; it caches whole blocks for other models, and with images, LoRA or a KV connector"
)


def tag_version(image: str) -> str:
    """The version that an image of vLLM's own, or of spark-vllm-docker, is tagged with; empty if its tag is none."""
    found = _SPARK.fullmatch(image) or _OWN.fullmatch(image)
    return (found["version"] or "") if found else ""


def release_image(image: str) -> str:
    """The one that the plugin fits in place of an image of vLLM's own, of the same variant; empty for another image."""
    found = _OWN.fullmatch(image)
    return f"{found[1]}:v{RELEASE}{found[3] or found[4] or ''}" if found else ""


def is_supported(version: str) -> bool:
    """Whether the plugin knows a version, as far as it can be read."""
    found = re.match(r"(\d{1,6})\.(\d{1,6})", version, re.ASCII)
    return found is None or FIRST <= (int(found[1]), int(found[2])) <= LAST


def is_fork(name: str) -> bool:
    """Whether an image's name, a version or a flag of a build is of the B12X fork."""
    return any(sign in name.lower() for sign in FORK_SIGNS if not sign.startswith("--"))


def fork_signs(names: Iterable[str], flags: Mapping[str, str]) -> list[str]:
    """What of images, builds and flags of vLLM is of the B12X fork."""
    signs = (sign.partition(" ") for sign in FORK_SIGNS if sign.startswith("--"))
    given = [flag + space + value for flag, space, value in signs if flag in flags and value in flags[flag]]
    return [*filter(is_fork, names), *given]
