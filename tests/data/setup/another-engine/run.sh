#!/bin/sh
docker run -p 30000:30000 lmsysorg/sglang python3 -m sglang.launch_server --model-path Qwen/Qwen3.6-35B-A3B
