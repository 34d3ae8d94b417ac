#!/bin/bash
source /srv/vllm/.venv/bin/activate
exec vllm serve Qwen/Qwen3.6-27B --port "$PORT"
