#!/bin/sh
if nvidia-smi; then docker run --gpus all vllm/vllm-openai:v0.33.0 Qwen/Qwen3.6-35B-A3B; else docker run vllm/vllm-openai:v0.33.0 Qwen/Qwen3.6-35B-A3B; fi
