#!/bin/sh
set -- docker run --rm -p 8000:8000
set -- "$@" vllm/vllm-openai:v0.33.0 Qwen/Qwen3.6-35B-A3B
exec "$@"
