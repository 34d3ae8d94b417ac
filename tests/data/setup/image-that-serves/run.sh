#!/bin/sh
docker run -d --net=host --ipc=host vllm-qwen35-v019 \
  serve Qwen/Qwen3.6-35B-A3B --port 8000 --reasoning-parser qwen3
