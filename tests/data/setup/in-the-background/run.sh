#!/bin/bash
source venvs/vllm/bin/activate
export VLLM_USE_RUST_FRONTEND=1
nohup vllm serve Qwen/Qwen3.6-35B-A3B --port 8000 > vllm.log 2>&1 &
until curl -s localhost:8000/health; do sleep 1; done
