podman run --entrypoint=a --entrypoint=bash --network=host --name=x mine:1 -c 'pip install a && vllm serve Qwen/Qwen3.6-35B-A3B --host 1.2.3.4'
