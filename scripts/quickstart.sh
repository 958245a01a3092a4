#!/usr/bin/env bash
# From nothing to a table: a target, its own answers, a drafter trained on them, and eight prompts answered both ways.
# Minutes on two cores. A second run skips what is finished and goes on with what is not.
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/venv.sh
use_venv

run=runs/quickstart
drafter target fetch smollm2-135m
drafter distill --target smollm2-135m --out $run/answers.jsonl --max-new-tokens 128 \
    --temperature 0,0.7,1,0.7 --num-answers 4
if [ ! -e $run/drafter ]; then
    drafter train --config smollm2-135m-quick --ckpt_path last
    drafter export $run/checkpoints/last.ckpt --out $run/drafter
fi
rm -rf $run/states # 70 MB, of use to the training alone
# Every text equals plain decoding, token for token: first with the drafter that was just made.
drafter decode --target smollm2-135m --drafter $run/drafter --prompts scripts/quickstart-prompts.jsonl \
    --max-new-tokens 96 --compare --method drafter --out $run/decoded.jsonl
# Then with the drafter that comes with the package, which was trained for longer.
drafter decode --target smollm2-135m --prompts scripts/quickstart-prompts.jsonl --max-new-tokens 96 --compare \
    --method drafter
