#!/usr/bin/env bash
# From nothing to a table: a target, its own answers, two drafters trained on them, and eight prompts answered plainly
# and with each. Minutes on two cores. A second run skips what is finished and goes on with what is not.
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/venv.sh
use_venv

run=runs/quickstart
drafter target fetch smollm2-135m
drafter distill --target smollm2-135m --out $run/answers.jsonl --max-new-tokens 128 \
    --temperature 0,0.7,1,0.7 --num-answers 4 --states $run/states

# Train with the quick recipe and export, unless that is finished.
#   learn FOLDER OPTIONS..
learn() {
    if [ -e "$1/drafter" ]; then return; fi
    drafter train --config smollm2-135m-quick --out "$1" --ckpt-path last "${@:2}"
    drafter export "$1/checkpoints/last.ckpt" --out "$1/drafter"
}
# The drafter that comes with the package goes on learning: two passes, with the draft tokens that it has.
learn $run/warm --trainer.max_epochs 2 --model.init_from drafter/assets/smollm2-135m \
    --model.drafter.draft_vocab_size 8192 --model.optim.lr 3e-4
learn $run # as for a model that has no drafter yet: new weights
rm -rf $run/states # 70 MB, of use to the training alone

# Every text equals plain decoding, token for token.
#   compare TITLE DRAFTER OPTIONS..
compare() {
    printf '\n%s\n' "$1"
    drafter decode --target smollm2-135m --drafter "$2" --prompts scripts/quickstart-prompts.jsonl --max-new-tokens 96 \
        --compare --method drafter "${@:3}"
}
compare "The package's drafter after two passes over these answers:" $run/warm/drafter --out $run/decoded.jsonl
compare "The package's drafter:" smollm2-135m
compare "A drafter of new weights after six passes over these answers:" $run/drafter
