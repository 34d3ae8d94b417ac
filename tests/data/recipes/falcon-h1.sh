# Podman, and a command that the image would not start by itself.
podman run --rm -it --network=host --device nvidia.com/gpu=all --entrypoint bash docker.io/vllm/vllm-openai:v0.32.0 \
  -c 'pip install -q bitsandbytes && vllm serve tiiuae/Falcon-H1-34B-Instruct --max-model-len 32768 --port 9000'
