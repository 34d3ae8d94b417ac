#!/bin/sh
set -u
vllm serve "$MODEL" --port 8000
