#!/bin/sh
sudo -E docker run -d --gpus '"device=0,1"' --env "HF_TOKEN=$HF_TOKEN" -p 10.0.0.7:9000:8001 --ipc=host vllm/vllm-openai:v0.33.0 --model Qwen/Qwen3.6-35B-A3B --port 8001 -tp 2
