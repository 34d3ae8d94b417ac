#!/usr/bin/env bash
# the owner's
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"   # it's here
. "$here/settings.env"
awk '{ print $0 }' "${0%/*}/settings.env"
docker run --env-file ./settings.env -p 8000:8000 vllm/vllm-openai:v0.33.0 Qwen/Qwen3.6-35B-A3B --max-model-len "$LENGTH"
