#!/bin/sh
docker start llm 2>/dev/null || sudo docker run -d --name llm -p 8000:8000 vllm/vllm-openai:v0.33.0 Qwen/Qwen3.6-35B-A3B
