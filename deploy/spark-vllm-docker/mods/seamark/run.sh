#!/usr/bin/env bash
# A mod of spark-vllm-docker: puts Seamark's plugin into the container that starts, and changes nothing else.
# make-mod.sh writes this folder into mods/ there, with a wheel of the plugin beside this script. Then:
# launch-cluster.sh --apply-mod mods/seamark ..., or `mods: [mods/seamark]` in a recipe.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"

wheels=(./vllm_seamark-*.whl)
[ -e "${wheels[0]}" ] || { echo "[seamark] no wheel beside $PWD/run.sh: make it with make-mod.sh" >&2; exit 1; }

# --no-deps: torch, vLLM and their dependencies stay as the container has them.
if command -v uv >/dev/null; then
    uv pip install --python "$(command -v python3)" --break-system-packages --no-index --no-deps --reinstall "${wheels[@]}"
else
    PIP_BREAK_SYSTEM_PACKAGES=1 python3 -m pip install --no-index --no-deps --force-reinstall "${wheels[@]}"
fi
python3 -c 'from importlib.metadata import version; print("[seamark]", version("vllm-seamark"), "is in place")'
# Whether it knows the vLLM of this container. If not, vLLM starts as it is, and this line is why nothing hits.
python3 -m engine_patches patches --check || echo "[seamark] vLLM starts without Seamark" >&2
