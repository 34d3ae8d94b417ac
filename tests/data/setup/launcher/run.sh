#!/usr/bin/env bash
a
./launch-cluster.sh -t x exec vllm serve Qwen/Qwen3.6-35B-A3B -tp 2 --a 1
b
