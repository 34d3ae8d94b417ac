#!/bin/sh
conda activate llm
vllm serve Qwen/Qwen3.6-35B-A3B
