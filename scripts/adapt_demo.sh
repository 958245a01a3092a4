#!/usr/bin/env bash
# A server learns its traffic while it answers: record, adapt, take over. Fifteen minutes on two cores, no network.
#   bash scripts/adapt_demo.sh [--minutes 6] [--answers 300]
# The server answers two streams of requests (translation from German; a fixed JSON form after a long system prompt) and
# general prompts, which are not recorded. `drafter adapt` learns the recorded answers beside the server and replaces the
# drafter's folder; the server swaps. Tokens per step over time go to runs/adapt-demo: results.jsonl and adapt.svg.
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/venv.sh
use_venv serve
python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt matplotlib

run=runs/adapt-demo
rm -rf $run
mkdir -p $run
drafter target fetch smollm2-135m
cp -r drafter/assets/smollm2-135m $run/drafter
python scripts/adapt_demo.py $run "$@"
