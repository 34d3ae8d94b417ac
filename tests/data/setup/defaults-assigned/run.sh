: "${MODEL:=Qwen/Qwen3.6-35B-A3B}"
: ${PORT:=8007}
vllm serve $MODEL --port $PORT