docker run -p 8000:8000 vllm/vllm-openai:v0.20.0 Qwen/Qwen3.6-27B --guided-decoding-backend xgrammar
