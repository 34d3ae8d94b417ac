docker run -p 8000:8000 vllm/vllm-openai:v0.28.0 Qwen/Qwen3.6-27B --speculative-config.method suffix
