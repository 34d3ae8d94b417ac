#!/bin/sh
docker compose -f x.yaml up -d
