#!/bin/bash
# vllm serve old
vllm serve Qwen/Qwen3.6-35B-A3B --mamba-cache-mode align --a 1 --no-enable-prefix-caching --mamba_cache_mode=align --b 2>&1 | tee log
end
