#!/bin/bash
IMAGE=${IMAGE:-vllm/vllm-openai:v0.28.0}
docker pull "$IMAGE"
docker run -p 8000:8000 "$IMAGE" Qwen/Qwen3.6-35B-A3B
