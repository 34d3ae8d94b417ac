#!/usr/bin/env bash
# A playbook's `docker run`, with the frontend in Rust.
set -e
export MODEL=nvidia/Qwen3.6-35B-A3B-NVFP4
docker run -d --rm --name qwen36 --gpus all --ipc=host \
  -p 8000:8000 \
  -v "$HOME/.cache/huggingface:/root/.cache/huggingface" \
  -e HF_TOKEN="$HF_TOKEN" \
  -e VLLM_USE_RUST_FRONTEND=1 \
  vllm/vllm-openai:v0.28.0 \
  nvidia/Qwen3.6-35B-A3B-NVFP4 \
  --enable-prefix-caching --async-scheduling \
  --kv-cache-dtype fp8 --attention-backend flashinfer --moe-backend marlin \
  --max-model-len 262144 --max-num-seqs 8 --max-num-batched-tokens 8192 \
  --gpu-memory-utilization 0.5 --load-format fastsafetensors \
  --reasoning-parser qwen3 --enable-auto-tool-choice --tool-call-parser qwen3_coder
docker logs -f qwen36
