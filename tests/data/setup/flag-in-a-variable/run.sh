#!/bin/bash
CACHE=--no-enable-prefix-caching
vllm serve Qwen/Qwen3.6-35B-A3B "$CACHE"
