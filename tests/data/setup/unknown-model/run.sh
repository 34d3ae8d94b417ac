podman run -p 8000:8000 vllm/vllm-openai:v0.33.0 my-org/Something-7B
