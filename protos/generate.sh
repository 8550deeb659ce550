#!/usr/bin/env bash
# Generates the code of every .proto in this folder: Python next to it; Rust in cachemgr's core, if protoc-gen-prost is
# in the folder of plugins; and Go in ../client/go, if protoc-gen-go and protoc-gen-go-grpc are.
# Usage: protos/generate.sh [PYTHON [PLUGINS]]
set -euo pipefail
cd "$(dirname "$0")"
python=${1:-python}
plugins=${2:-}
PATH="$(dirname "$("$python" -c 'import sys; print(sys.executable)')"):$PATH"  # for protoc-gen-mypy_grpc
messages=$(find quire -name '*.proto' | sort)
services=$(find quire -name '*_service.proto' | sort)
"$python" -m grpc_tools.protoc -I. --python_out=. --mypy_out=. $messages
"$python" -m grpc_tools.protoc -I. --grpc_python_out=. --mypy_grpc_out=. $services
[ -n "$plugins" ] || exit 0
PATH="$plugins:$PATH"
if [ -e "$plugins/protoc-gen-prost" ]; then
  mkdir -p ../cachemgr/core/src/wire
  prost_options=(--prost_out=../cachemgr/core/src/wire --prost_opt=disable_comments=.,flat_output_dir=true)
  "$python" -m grpc_tools.protoc -I. "${prost_options[@]}" quire/cache/v1/*.proto
fi
[ -e "$plugins/protoc-gen-go" ] || exit 0
mkdir -p ../client/go
go_options=(--go_out=../client/go --go_opt=paths=source_relative)
"$python" -m grpc_tools.protoc -I. "${go_options[@]}" $messages
"$python" -m grpc_tools.protoc -I. --go-grpc_out=../client/go --go-grpc_opt=paths=source_relative $services
