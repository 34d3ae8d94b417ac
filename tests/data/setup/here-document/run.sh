#!/bin/sh
cat > x <<'EOF'
vllm serve other/model
EOF
vllm serve Qwen/Qwen3.6-35B-A3B
