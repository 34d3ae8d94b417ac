#!/bin/sh
docker run "$@"
