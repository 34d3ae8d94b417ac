#!/bin/bash
start() {
  local image=${1:-vllm/vllm-openai:v0.33.0}
  docker run -d --name llm -p 8000:8000 "$image" Qwen/Qwen3.6-35B-A3B
}
case "${1:-}" in start) start;; stop) docker rm -f llm;; esac
