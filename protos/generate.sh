#!/usr/bin/env bash
# Generates the Python code of every .proto in this folder, next to it. Usage: protos/generate.sh [PYTHON]
set -euo pipefail
cd "$(dirname "$0")"
python=${1:-python}
PATH="$(dirname "$("$python" -c 'import sys; print(sys.executable)')"):$PATH"  # for protoc-gen-mypy_grpc
messages=$(find quire -name '*.proto' | sort)
services=$(find quire -name '*_service.proto' | sort)
"$python" -m grpc_tools.protoc -I. --python_out=. --mypy_out=. $messages
"$python" -m grpc_tools.protoc -I. --grpc_python_out=. --mypy_grpc_out=. $services
