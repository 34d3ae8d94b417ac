#!/usr/bin/env bash
set -euo pipefail
DIR="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
IMAGE="${VLLM_IMAGE:-my-vllm}"
docker build -t "${IMAGE}" "${DIR}" && docker run --rm -p "${PORT:-8000}:8000" "${IMAGE}" vllm serve Qwen/Qwen3.6-35B-A3B --max-model-len 4096
