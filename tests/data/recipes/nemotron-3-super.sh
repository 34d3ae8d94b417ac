#!/bin/bash
export VLLM_FLASHINFER_ALLREDUCE_BACKEND=trtllm
source ~/vllm/bin/activate

vllm serve nvidia/NVIDIA-Nemotron-3-Super-120B-A12B-NVFP4 \
  --max-model-len 262144 --gpu-memory-utilization 0.8 --max-num-seqs 8 \
  --max-num-batched-tokens 16384 --load-format fastsafetensors \
  --mamba-cache-mode align --mamba_ssm_cache_dtype float32 \
  --kv-cache-dtype fp8 --enable-prefix-caching \
  --reasoning-parser nemotron_v3 --enable-auto-tool-choice --tool-call-parser qwen3_xml \
  --speculative-config '{"method":"mtp","num_speculative_tokens":3}' 2>&1 | tee super.log
