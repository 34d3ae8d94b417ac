"""The lines of deploy/README.md that start `seamark gpu-check`: each is one that its reader takes."""

from __future__ import annotations

import json
import shlex
import subprocess
from pathlib import Path

from tests.deploy.compose_files import DEPLOY
from tests.harness.helm import complaints

SECTION = (DEPLOY / "README.md").read_text().partition("### On a GPU, run this first")[2]

# By its first word.
LINES = {
    Path(words[0]).name: words
    for text in SECTION.partition("```sh\n")[2].partition("```")[0].split("\n\n")
    for words in [shlex.split(text.replace("\\\n", " "))]
}


def overrides() -> dict[str, object]:
    (given,) = (word.partition("=")[2] for word in LINES["kubectl"] if word.startswith("--overrides="))
    return {"kind": "Pod", "metadata": {"name": "gpu-check"}, **json.loads(given)}


def test_the_mod_is_given_to_the_launcher_before_the_command():
    words = LINES["launch-cluster.sh"]
    assert words[words.index("--apply-mod") + 1] == "mods/seamark" and words.index("exec") == 4
    assert words[5:7] == ["seamark", "gpu-check"]


def test_kubernetes_takes_the_pod_and_a_shell_its_command():
    pod = overrides()
    assert complaints(pod) == []
    (container,) = pod["spec"]["containers"]  # type: ignore[index]
    assert container["name"] == "gpu-check" and f"--image={container['image']}" in LINES["kubectl"]
    assert container["resources"]["limits"] == {"nvidia.com/gpu": "1"}
    shell, dash_c, script = container["command"]
    assert dash_c == "-c"
    # The check's own exit status is the pod's, whatever is printed behind it.
    within = script.replace("python3 -m engine_patches gpu-check", "sh -c 'echo told > /dev/null; exit 3'")
    assert subprocess.run([shell, "-c", within], capture_output=True).returncode == 3
