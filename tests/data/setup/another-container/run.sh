#!/bin/sh
docker run -d --name redis -p 6379:6379 redis:7
docker run -d -p 8000:8000 vllm/vllm-openai:v0.33.0 Qwen/Qwen3.6-35B-A3B
