#!/bin/sh
docker run -p 8000:8000 vllm/vllm-openai:v0.33.0 --model "$1"
