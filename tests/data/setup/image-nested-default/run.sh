#!/bin/bash
docker run --gpus all -p 8000:8000 "${VLLM_IMAGE:-${X:-vllm/vllm-openai:v0.33.0}}" Qwen/Qwen3.6-35B-A3B
