#!/usr/bin/env bash
# Style, types and tests.
#   --slow      the tests that take minutes or need the default target, and those for CUDA if it is here
#   --newest    the tests, and the slow ones of the integrations, with the newest versions that pyproject.toml admits
#   --oldest    the same with the oldest versions
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/venv.sh
# One thread: the tensors are tiny, and threads that wait for each other cost more than they bring.
threads="${OMP_NUM_THREADS:-1}"

if [ "${1:-}" = --newest ] || [ "${1:-}" = --oldest ]; then
    use_end "${1#--}"
    status=0
    OMP_NUM_THREADS="$threads" pytest --durations 10 "${@:2}" || status=$?
    pytest -m "slow and not gpu" --durations 10 tests/integrations || status=$?
    exit "$status"
fi
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
OMP_NUM_THREADS="$threads" exec pytest --durations 10 "$@"
