#!/usr/bin/env bash
# Generates the code of every .proto in this folder: Python next to it and, if a folder with protoc-gen-go and
# protoc-gen-go-grpc is given, Go in ../client/go. Usage: protos/generate.sh [PYTHON [GO_PLUGINS]]
set -euo pipefail
cd "$(dirname "$0")"
python=${1:-python}
go_plugins=${2:-}
PATH="$(dirname "$("$python" -c 'import sys; print(sys.executable)')"):$PATH"  # for protoc-gen-mypy_grpc
messages=$(find quire -name '*.proto' | sort)
services=$(find quire -name '*_service.proto' | sort)
"$python" -m grpc_tools.protoc -I. --python_out=. --mypy_out=. $messages
"$python" -m grpc_tools.protoc -I. --grpc_python_out=. --mypy_grpc_out=. $services
[ -n "$go_plugins" ] || exit 0
PATH="$go_plugins:$PATH"
mkdir -p ../client/go
go_options=(--go_out=../client/go --go_opt=paths=source_relative)
"$python" -m grpc_tools.protoc -I. "${go_options[@]}" $messages
"$python" -m grpc_tools.protoc -I. --go-grpc_out=../client/go --go-grpc_opt=paths=source_relative $services
