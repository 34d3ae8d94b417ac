#!/bin/sh
docker run -d -e OPENAI_API_BASE_URL=http://vllm:8000/v1 ghcr.io/open-webui/open-webui:main
docker run -d -p 8000:8000 vllm/vllm-openai:v0.33.0 Qwen/Qwen3.6-35B-A3B
