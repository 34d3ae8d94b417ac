#!/usr/bin/env bash
# Gives a checkout of spark-vllm-docker the mod: make-mod.sh PATH/TO/spark-vllm-docker [RECIPE...]
# RECIPE: one of those beside this script, such as seamark-qwen3.6-35b, to be put there, too.
# Or any folder the mod alone, for recipes that name it by its path: make-mod.sh --alone FOLDER
# The wheel holds the plugin (`engine_patches`) alone; the gateway runs outside that container.
# seamark.sha256 there has a digest of each file, from when it was made: what is not so is the user's, and stays.
set -euo pipefail
checkout=yes
[ "${1:-}" != --alone ] || { checkout=; shift; }
target=${1:?usage: make-mod.sh PATH/TO/spark-vllm-docker [RECIPE...]}
shift
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
root=$(cd "$here/../.." && pwd)
if [ "$checkout" ] && ! { [ -d "$target/mods" ] && [ -d "$target/recipes" ]; }; then
    echo "make-mod.sh: $target has no mods/ and recipes/" >&2
    exit 1
fi
for each in "$@"; do
    [ -e "$here/recipes/$each.yaml" ] || { echo "make-mod.sh: no recipe $each; there are:" "$here"/recipes/*.yaml >&2; exit 1; }
done

source=$(mktemp -d)
trap 'rm -rf "$source"' EXIT
cp -r "$root"/{pyproject.toml,setup.py,README.md,LICENSE,engine_patches} "$source"
# `seamark` is a command of the gateway's half, which is not here: let it start the plugin's.
sed -i 's/"proxy.cli:main"/"engine_patches.__main__:main"/' "$source/pyproject.toml"
[ ! -e "$root/.git" ] || export SEAMARK_COMMIT="${SEAMARK_COMMIT:-$(git -C "$root" rev-parse HEAD 2> /dev/null)}"
mkdir -p "$source"/made/{mods/seamark,recipes}
# What is there already stays until there is a new one.
if ! python3 -m pip wheel --quiet --no-deps --wheel-dir "$source/made/mods/seamark" "$source"; then
    echo "make-mod.sh: no wheel, and nothing changed in $target: python3 needs pip, which fetches setuptools from its" \
        "package index. Without a network, run this on a machine that has one, and copy mods/seamark" >&2
    exit 1
fi
cp "$here/mods/seamark/run.sh" "$source/made/mods/seamark/"
for each in "$@"; do cp "$here/recipes/$each.yaml" "$source/made/recipes/"; done

mkdir -p "$target/mods/seamark"
cd "$target"
shopt -s nullglob
old=(mods/seamark/vllm_seamark-*.whl)
mapfile -t new < <(cd "$source/made" && find . -type f -printf '%P\n' | sort)
for each in "${old[@]}" "${new[@]}"; do
    [ -e "$each" ] || [ -L "$each" ] || continue
    if [ -L "$each" ] || ! grep -qxF "$(sha256sum "$each")" seamark.sha256 2> /dev/null; then
        echo "make-mod.sh: $target/$each is not as this script made it, and nothing changed: move it away first" >&2
        exit 1
    fi
done
rm -f "${old[@]}" "${new[@]}"
touch seamark.sha256
(cd "$source/made" && sha256sum "${new[@]}") | grep -vxFf <(cat seamark.sha256) >> seamark.sha256 || true
for each in "${new[@]}"; do cp "$source/made/$each" "$each"; done
echo "in $target, and listed in its seamark.sha256: ${new[*]}"
