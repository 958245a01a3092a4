#!/usr/bin/env bash
# On a machine with a CUDA device: the tests that need one, then the times of steps with each tree. No network is needed.
# ACCELERATOR=cpu: the same on a CPU, where those tests are left out and the random target is tiny.
#   scripts/gpu_check.sh [FOLDER OF SMOLLM2-135M] [OUT.json]
# PYTHON: the interpreter to use (torch, transformers and tqdm must be there; pytest for the tests).
set -euo pipefail
cd "$(dirname "$0")/.."
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" HF_HUB_OFFLINE=1
python="${PYTHON:-python3}"

status=0
if "$python" -c 'import pytest' 2>/dev/null; then
    # Only the files with such tests are read: others may need packages that are not here.
    mapfile -t files < <(grep -rl --include='test_*.py' 'mark\.gpu' tests)
    timeout 300 "$python" -m pytest -m gpu -o addopts= -q --durations 5 "${files[@]}" || status=$?
else
    echo "gpu_check: pytest is not installed, so the tests are left out" >&2
fi
on_cpu=()
if [ "${ACCELERATOR:-gpu}" = cpu ]; then
    on_cpu=(--device cpu --dtype float32 --shapes tiny --seconds 5)
fi
"$python" scripts/gpu_check.py --out "${2:-gpu-check.json}" ${1:+--target "$1"} "${on_cpu[@]}"
exit "$status"
