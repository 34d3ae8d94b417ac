#!/bin/sh
docker run $OPTS vllm/vllm-openai:v0.33.0 Qwen/Qwen3.6-35B-A3B
