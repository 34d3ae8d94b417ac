#!/bin/sh
OPTS="--gpus all --ipc=host -p 8000:8000"
ARGS="--max-model-len 4096 --mamba-cache-mode align --no-enable-prefix-caching --tool-call-parser qwen3_xml"
docker run $OPTS vllm/vllm-openai:v0.33.0 --model Qwen/Qwen3.6-35B-A3B $ARGS "$@"
