"""The versions of vLLM that the plugin knows, the fork that it does not, and what an image's name says of either."""

from __future__ import annotations

import re

# As the plugin's settings have them.
SUPPORTED, IMAGE = "0.31 to 0.33", "vllm/vllm-openai:v0.33.0"

FIRST, LAST = (0, 31), (0, 33)

RELEASE = IMAGE.rpartition(":v")[2]  # to take in place of another version

# An image of vLLM's own: repository, version (none with `latest`, `nightly` or a model's name), variant (`-cu130`).
_OWN = re.compile(
    r"((?:[\w.:-]+/)*vllm-openai(?:-\w+)?)"
    r"(?::(?:v(\d{1,6}\.\d{1,6}(?:\.\d{1,6})?)[\w.]{0,64}(-[\w.-]{1,128})?|[\w.-]{1,128}?(-cu\d+)?))?(?:@.*)?",
    re.ASCII,
)
_SPARK = re.compile(r"vllm-node-(\d{1,6}\.\d{1,6}\.\d{1,6})", re.ASCII)  # as the doctor's cure names it

# What tells the B12X fork of vLLM: parts of an image's name or of a flag of its build, and flags of its `vllm serve`
# that vLLM's own does not have, with a value where vLLM has the flag.
FORK_SIGNS = (
    *("b12x", "voipmonitor/vllm", "localinferencelab/vllm", "local-inference-lab/vllm"),
    *("--load-format b12x", "--kda-prefill-backend b12x", "--gdn-decode-kernel", "--recurrent-checkpoint-policy"),
    *("--recurrent-page-size", "--prefill-compute-share", "--max-parallel-prefills", "--fairness-engine"),
    *("--max-num-prefill-tokens-per-step", "--decode-prefill-min-decode-steps", "--decode-prefill-max-wait-ms"),
)

FORK = "the plugin leaves the B12X fork of vLLM untouched"


def fork_alone(model: str) -> str:
    """What the fork keeps for a model by itself."""
    if not any(each in model.lower() for each in ("flash-next", "glm-5.3-flash")):
        return (
            "alone the fork keeps states for Qwen3.8-Flash-Next and GLM-5.3-Flash, and caches whole blocks for others"
        )
    return (
        "alone the fork keeps a state at the end of the system prompt, of the prompt and of the answer; none for a "
        "document in a user's message, for several places of a prompt, for equal prompts at once, nor with images, "
        "LoRA or a KV connector"
    )


def tag_version(image: str) -> str:
    """The version that an image of vLLM's own, or of spark-vllm-docker, is tagged with; empty if its tag is none."""
    if found := _SPARK.fullmatch(image):
        return found[1]
    found = _OWN.fullmatch(image)
    return (found[2] or "") if found else ""


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
