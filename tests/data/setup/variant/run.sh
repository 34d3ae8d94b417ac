#!/bin/sh
docker run --rm --gpus all -p 8000:8000 -e VLLM_ATTENTION_BACKEND=FLASHINFER -v ~/.cache/vllm:/root/.cache/vllm \
  vllm/vllm-openai:v0.29.0-cu130 Qwen/Qwen3-Coder-Next --disable-log-requests --swap-space 16 --mamba-cache-mode align
