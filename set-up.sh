#!/usr/bin/env bash
# Makes .venv ready for `make demo`: system packages, CPU torch, locked dependencies, Seamark itself. With the argument
# `tests` also what tests use: Redis, Prometheus, nginx, HAProxy and a browser. Does nothing if everything is in place. Says what it does.
set -euo pipefail
cd "$(dirname "$0")"

say() { echo "set-up: $*" >&2; }

# Where torch's CPU build is found if the configured package index has only CUDA builds.
TORCH_CPU_INDEX="${SEAMARK_TORCH_INDEX:-https://download.pytorch.org/whl/cpu}"

# --- what only the system can give: an interpreter with venv, the NUMA library of vLLM's CPU build; and to test with,
# Redis, Prometheus, nginx, HAProxy and a browser ---
find_python() {
    for candidate in "${PYTHON:-python3}" python3.13 python3.12 python3.11; do
        if "$candidate" -c 'import sys, venv, ensurepip; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' 2>/dev/null; then
            command -v "$candidate"
            return
        fi
    done
}

missing=()
[ -n "$(find_python)" ] || missing+=(python3 python3-venv)
[ -n "$(PATH=$PATH:/usr/sbin:/sbin ldconfig -p | grep 'libnuma\.so\.1')" ] || missing+=(libnuma1)
services=()
if [ "${1:-}" = tests ]; then
    command -v redis-server >/dev/null || services+=(redis-server)
    command -v promtool >/dev/null || services+=(prometheus)
    PATH=$PATH:/usr/sbin command -v nginx >/dev/null || services+=(nginx-light)
    PATH=$PATH:/usr/sbin command -v haproxy >/dev/null || services+=(haproxy)
    command -v chromium chromium-browser google-chrome >/dev/null || missing+=(chromium fonts-dejavu-core)
fi
missing+=(${services[@]+"${services[@]}"})
if [ ${#missing[@]} -gt 0 ]; then
    as_root=()
    [ "$(id -u)" -eq 0 ] || as_root=(sudo)
    if ! command -v apt-get >/dev/null; then
        say "these are missing, please install them: ${missing[*]} (Python 3.11 to 3.13)"
        exit 1
    fi
    say "installing system packages: ${missing[*]}"
    "${as_root[@]}" apt-get update -qq
    "${as_root[@]}" apt-get install -y -qq --no-install-recommends "${missing[@]}"
    # Tests start their own; only the programs are wanted.
    if [ ${#services[@]} -gt 0 ] && [ -d /run/systemd/system ]; then
        say "switching their services off: ${services[*]}"
        "${as_root[@]}" systemctl disable --now --quiet "${services[@]/nginx-light/nginx}"
    fi
fi

wanted=$(cat requirements.lock pyproject.toml "$0" | sha256sum | cut -d' ' -f1)
if [ "$(cat .venv/.seamark-set-up 2>/dev/null)" = "$wanted" ]; then
    exit 0
fi
python=$(find_python)
if [ -z "$python" ]; then
    say "Python 3.11 to 3.13 with venv is needed; set PYTHON to one"
    exit 1
fi

# --- the virtual environment ---
[ -x .venv/bin/python ] || { say "creating .venv with $python"; "$python" -m venv .venv; }
pip() { .venv/bin/python -m pip --quiet --disable-pip-version-check "$@"; }

torch=$(grep -m1 -o '^torch==[^ ;]*+cpu' requirements.lock)
if [ "$(.venv/bin/python -c 'from importlib.metadata import version; print("torch==" + version("torch"))' 2>/dev/null)" != "$torch" ]; then
    say "installing $torch"
    if ! pip install --no-deps "$torch" 2>/dev/null; then
        say "the configured package index has no CPU build of torch; taking it from $TORCH_CPU_INDEX"
        pip install --no-deps --index-url "$TORCH_CPU_INDEX" "$torch"
    fi
fi

# --no-deps: the lock is complete, and resolving would bring CUDA builds of torchvision, torchaudio and torchcodec,
# next to which a CPU torch fails to import transformers' models.
say "installing the locked dependencies (about 3 GB, a few minutes the first time)"
pip install --no-deps -r requirements.lock
say "installing Seamark"
# Its former name; both own the same files.
pip uninstall --yes seamark 2>/dev/null
pip install --no-deps --no-build-isolation --editable .
echo "$wanted" > .venv/.seamark-set-up
say "ready"
