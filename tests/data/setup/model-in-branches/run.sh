#!/bin/sh
if [ "$1" = big ]; then MODEL=a/Qwen3.5-397B-A17B; else MODEL=Qwen/Qwen3.6-35B-A3B; fi
vllm serve "$MODEL" --port 8000
