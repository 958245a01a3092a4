#!/usr/bin/env bash
# The first 12 minutes on a machine with a CUDA device and no network: the tests that need one, then the stages of
# scripts/gpu_check.py, each in a process of its own and with a limit of time. Every measurement is a line of JSON,
# written at once. A stage that fails or takes too long does not stop the next.
#   scripts/gpu_check.sh [OUT.jsonl [STAGE...]]      stages: tests identity steps answers train prefill
# Needs torch, transformers, lightning, pydantic, psutil and tqdm (pytest for the tests); what the machine lacks may lie
# in a folder on PYTHONPATH: pip install --no-deps --target site pydantic pydantic-core annotated-types typing-inspection
# SmolLM2-135M is measured, too, where $DRAFTER_HOME holds it (scripts/gpu_train.sh brings it).
# PYTHON: the interpreter. OPTIONS: of gpu_check.py, such as --eager; on a CPU "--device cpu --dtype float32 --shapes tiny --small".
set -uo pipefail
cd "$(dirname "$0")/.."
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
python="${PYTHON:-python3}" out="${1:-gpu-check.jsonl}"
[ $# -gt 1 ] && stages=("${@:2}") || stages=(tests identity steps answers train prefill)
declare -A seconds=([tests]=90 [identity]=100 [steps]=220 [answers]=160 [train]=90 [prefill]=60)

"$python" -c 'import drafter.engine.engine, drafter.training.module' || exit
status=0
for stage in "${stages[@]}"; do
    began=$SECONDS
    if [ "$stage" = tests ]; then
        # Only the files with such tests are read: others may need packages that are not here.
        mapfile -t files < <(grep -rl --include='test_*.py' 'mark\.gpu' tests)
        command=(-m pytest -m gpu -o addopts= -q --durations 5 "${files[@]}")
    else
        # shellcheck disable=SC2206  # words
        command=(scripts/gpu_check.py "$stage" --out "$out" ${OPTIONS:-})
    fi
    timeout "${seconds[$stage]}" "$python" "${command[@]}"
    code=$?
    echo "gpu_check: $stage ended with $code after $((SECONDS - began)) s"
    [ "$code" -eq 0 ] || status=1
done
exit "$status"
