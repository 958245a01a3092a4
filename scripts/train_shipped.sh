#!/usr/bin/env bash
# The shipped drafter, from prompts to drafter/assets/smollm2-135m: the target's answers, training, export, acceptance.
#   scripts/train_shipped.sh PROMPTS.jsonl EVALUATION.jsonl [options of `drafter train`]
# Each stage goes on where it stopped: run the command again after an interruption. EVALUATION holds prompts that are
# never trained on (MT-bench). WORK: folder for answers, states and checkpoints (default: runs/shipped).
# START: drafter to start from (default: new weights). OUT: where the drafter goes.
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/venv.sh
use_venv

prompts=${1:?prompts to train on}
evaluation=${2:?prompts to evaluate on}
shift 2
work=${WORK:-runs/shipped}
out=${OUT:-drafter/assets/smollm2-135m}
mkdir -p "$work"
for temperature in 0 1; do
    drafter distill --target smollm2-135m --dtype bfloat16 --prompts "$prompts" --max-new-tokens 320 \
        --temperature $temperature --out "$work/answers-$temperature.jsonl"
done
drafter train --config smollm2-135m --data.train "[$work/answers-0.jsonl,$work/answers-1.jsonl]" \
    --data.cache_hidden_states "$work/states" --trainer.default_root_dir "$work" --ckpt_path last \
    ${START:+--model.init_from "$START"} "$@"
drafter export "$work/checkpoints/last.ckpt" --out "$out"
python scripts/acceptance.py "$out" --prompts "$evaluation" --tree "W4 L3 N8" "W8 L4 N24" "W28 L5 N64" \
    --copying off on --results "$work/acceptance.jsonl"
