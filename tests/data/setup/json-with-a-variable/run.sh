#!/bin/bash
N=3
vllm serve Qwen/Qwen3.6-35B-A3B --speculative-config "{\"method\":\"mtp\",\"num_speculative_tokens\":$N}" --kv_transfer_config.kv_connector NixlConnector
