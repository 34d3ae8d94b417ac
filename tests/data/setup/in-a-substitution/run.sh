#!/bin/sh
CID=$(docker run -d --gpus all -p 8000:8000 vllm/vllm-openai:v0.33.0 Qwen/Qwen3.6-35B-A3B)
docker logs -f "$CID"
