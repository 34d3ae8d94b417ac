#!/bin/sh
docker run -p 8080:8000 -p 8081:9 vllm/vllm-openai:v0.33.0 Qwen/Qwen3.6-35B-A3B
