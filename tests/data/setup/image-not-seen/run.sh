#!/bin/sh
IMAGE=$(docker images -q vllm | head -1)
docker run -p 8000:8000 $IMAGE Qwen/Qwen3.6-35B-A3B
