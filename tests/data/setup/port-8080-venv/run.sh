#!/bin/sh
exec "$HOME/venv/bin/vllm" serve Qwen/Qwen3.6-35B-A3B --port 8080
