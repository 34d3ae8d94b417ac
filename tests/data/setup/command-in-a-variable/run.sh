#!/bin/bash
CMD="vllm serve Qwen/Qwen3.6-35B-A3B --port 8000"
if [ -n "$X" ]; then CMD="$CMD --enforce-eager"; fi
echo "Running: $CMD"
eval $CMD
