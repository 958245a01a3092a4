#!/usr/bin/env bash
# Style, types and tests. With --slow: the tests that take minutes or need the default target, and those for CUDA if it is here.
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/venv.sh
use_venv dev

if [ "${1:-}" = "--slow" ]; then
    marks="slow and not gpu"
    if python -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
        marks="slow or gpu"
    fi
    exec pytest -m "$marks" --durations 10 "${@:2}"
fi
ruff check .
ruff format --check .
mypy
# One thread: the tensors are tiny, and threads that wait for each other cost more than they bring.
OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" exec pytest --durations 10 "$@"
