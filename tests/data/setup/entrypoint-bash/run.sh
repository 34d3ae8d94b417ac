#!/bin/bash
docker run --entrypoint bash -p 8000:8000 vllm/vllm-openai:v0.33.0 -c 'vllm serve Qwen/Qwen3.6-35B-A3B'
