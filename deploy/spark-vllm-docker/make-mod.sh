#!/usr/bin/env bash
# Gives a checkout of spark-vllm-docker the mod and the recipes: make-mod.sh PATH/TO/spark-vllm-docker
# The wheel holds the plugin (`engine_patches`) alone; the gateway runs outside that container.
set -euo pipefail
target=${1:?usage: make-mod.sh PATH/TO/spark-vllm-docker}
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
root=$(cd "$here/../.." && pwd)
[ -d "$target/mods" ] && [ -d "$target/recipes" ] || { echo "make-mod.sh: $target has no mods/ and recipes/" >&2; exit 1; }

source=$(mktemp -d)
trap 'rm -rf "$source"' EXIT
cp -r "$root"/{pyproject.toml,README.md,LICENSE,engine_patches} "$source"
# `seamark` is a command of the gateway's half, which is not here: let it start the plugin's.
sed -i 's/"proxy.cli:main"/"engine_patches.__main__:main"/' "$source/pyproject.toml"
# What is there already stays until there is a new one.
if ! python3 -m pip wheel --quiet --no-deps --wheel-dir "$source/built" "$source"; then
    echo "make-mod.sh: no wheel, and nothing changed in $target: python3 needs pip, which fetches setuptools from its" \
        "package index. Without a network, run this on a machine that has one, and copy mods/seamark" >&2
    exit 1
fi
mkdir -p "$target/mods/seamark"
rm -f "$target"/mods/seamark/{,vllm_}seamark-*.whl
cp "$source"/built/*.whl "$target/mods/seamark/"
cp "$here/mods/seamark/run.sh" "$target/mods/seamark/"
cp "$here"/recipes/*.yaml "$target/recipes/"
echo "mods/seamark and $(ls "$here/recipes" | wc -l) recipes are in $target"
