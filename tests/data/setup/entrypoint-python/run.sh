#!/bin/bash
docker run --entrypoint python3 -p 8000:8000 vllm/vllm-openai:v0.33.0 -m vllm.entrypoints.openai.api_server --model Qwen/Qwen3.6-35B-A3B
