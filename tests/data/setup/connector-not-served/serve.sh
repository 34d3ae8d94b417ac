vllm serve Qwen/Qwen3.6-27B --kv-transfer-config.kv_connector LMCacheConnectorV1
