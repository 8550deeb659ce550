#!/usr/bin/env bash
# Generates the code of every .proto in this folder: Python next to it; Rust in cachemgr's core and Go in ../client/go,
# each if its generator is installed. Not with buf: gRPC's Python generator is a part of grpc_tools' protoc and no plugin,
# and services, messages and the Rust package are of different files, so buf needs a template for each.
# Usage: protos/generate.sh FOLDER...   of commands: Python's, and those of the generators of Rust and Go
set -euo pipefail
cd "$(dirname "$0")"
PATH="$(IFS=: && echo "$*"):$PATH"
messages=$(find quire -name '*.proto' | sort)
services=$(find quire -name '*_service.proto' | sort)
wire=../cachemgr/core/src/wire
protoc() { python -m grpc_tools.protoc -I. "$@"; }

find quire -name '*_pb2*.py*' -delete
protoc --python_out=. --mypy_out=. $messages
protoc --grpc_python_out=. --mypy_grpc_out=. $services
python generate_reasons.py
if command -v protoc-gen-prost >/dev/null; then
  fresh=$(mktemp -d)
  trap 'rm -rf "$fresh"' EXIT
  protoc --prost_out="$fresh" --prost_opt=disable_comments=.,flat_output_dir=true quire/cache/v1/*.proto
  for file in "$fresh"/*; do # a file that is written anew, though it is equal, has the core built again
    cmp --silent "$file" "$wire/${file##*/}" || cp "$file" "$wire/"
  done
fi
if command -v protoc-gen-go >/dev/null; then
  find ../client/go/quire -name '*.pb.go' -delete
  protoc --go_out=../client/go --go_opt=paths=source_relative $messages
  protoc --go-grpc_out=../client/go --go-grpc_opt=paths=source_relative $services
fi
