#!/bin/bash
MODEL=Qwen/Qwen3.6-35B-A3B
PORT=8000
while [[ $# -gt 0 ]]; do
  case "$1" in
    --model) MODEL="$2"; shift 2;;
    --port) PORT="$2"; shift 2;;
    *) echo "usage: $0"; exit 1;;
  esac
done
exec vllm serve "$MODEL" --port "$PORT" "${EXTRA[@]}"
