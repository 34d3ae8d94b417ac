#!/bin/sh
docker run $OPTS Qwen/Qwen3.6-35B-A3B
