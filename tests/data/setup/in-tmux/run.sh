#!/bin/sh
tmux new-session -d -s v "vllm serve Qwen/Qwen3.6-35B-A3B --port 8000"
