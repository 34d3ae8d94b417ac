#!/bin/sh
docker run -p 8000:8000 -e MODEL_ID=Qwen/Qwen3.6-35B-A3B mine/vllm:1
