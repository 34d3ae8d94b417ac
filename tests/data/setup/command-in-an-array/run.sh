#!/bin/bash
CMD=(docker run --rm --gpus all)
CMD+=(-p 8000:8000)
IMAGE=vllm/vllm-openai:v0.33.0
CMD+=("$IMAGE" Qwen/Qwen3.6-35B-A3B --no-enable-prefix-caching)
exec "${CMD[@]}"
