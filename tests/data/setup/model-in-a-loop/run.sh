#!/bin/sh
for M in Qwen/Qwen3.6-35B-A3B b; do docker run -p 8000:8000 vllm/vllm-openai:v0.33.0 $M; done
