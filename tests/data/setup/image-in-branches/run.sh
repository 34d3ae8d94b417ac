if [ "$(uname -m)" = aarch64 ]; then IMAGE=mine:arm; else IMAGE=vllm/vllm-openai:v0.33.0; fi
docker run -p 8000:8000 "$IMAGE" Qwen/Qwen3.6-35B-A3B
