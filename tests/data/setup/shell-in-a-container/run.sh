#!/bin/bash
MODEL=Qwen/Qwen3.6-35B-A3B
docker run -p 8000:8000 nvcr.io/nvidia/vllm:25.09-py3 bash -lc "pip install x && vllm serve $MODEL --mamba-cache-mode align --port 8000 --speculative-config '{\"method\": \"mtp\", \"num_speculative_tokens\": 2}'"
