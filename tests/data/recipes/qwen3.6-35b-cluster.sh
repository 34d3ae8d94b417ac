./launch-cluster.sh --apply-mod mods/gpu-mem-util-gb -t vllm-node exec \
  vllm serve nvidia/Qwen3.6-35B-A3B-NVFP4 --host 0.0.0.0 --port 8000 -tp 2 --distributed-executor-backend ray \
  --kv-cache-dtype fp8 --max-num-seqs 4 --max-num-batched-tokens 8192 \
  --speculative-config '{"method":"qwen3_5_mtp","num_speculative_tokens":3}'
