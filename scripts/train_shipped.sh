#!/usr/bin/env bash
# A drafter for a target from nothing but this package: the target invents prompts and answers them, the drafter learns.
#   TARGET=smollm2-135m scripts/train_shipped.sh [ROUNDS]
# TARGET: alias, hub id, folder or .gguf file (default: smollm2-135m). CONFIG: settings of the training (default: the
# package's file of the target's name).
# A round has two parts, each a program with half of the processor's cores, which together do more than one with all. A
# part invents PROMPTS prompts, answers each twice, and learns the answers in EPOCHS passes at a constant rate. The next
# round goes on from the mean of both parts' weights (arXiv 1805.09767), with draft tokens chosen from all answers so far.
# New weights have no useful mean yet: in a first round from them, the second part goes on from the first. After round 1,
# 2, 4, 8 .. and the last, copies learn both parts once more while the rate falls to zero; the mean of both is a fall. The
# last fall goes to OUT, with a card; of three falls or more the mean of the last two, which is better on kinds of text
# that the last rounds lacked (docs/notebook.md). The tokens per step of every fall are measured, after the last round
# those of the drafter in OUT: acceptance-ROUND.jsonl are the curve.
# Run the command again after an interruption, or later with more ROUNDS: finished stages are skipped, and the falls of
# the calls before count.
# START: a drafter, whose weights the first round goes on from (default: new weights); the draft tokens stay START's, and
# OUT is the mean of START's weights and the last fall. FIRST: number of the first round (default: 1). The numbers of a
# round's parts, twice its own and the one before, decide the prompts: on another machine, give numbers that were not
# used.
# WORK: folder of answers, states, checkpoints and log (default: runs/TARGET-shipped); 5 GB for the smallest target, and 2
# bytes x hidden size for each position of a part. OUT: folder of the drafter (default: that of the package). The log has
# the core-hours of each stage, and their sum. EVALUATION: prompts to measure with, which are never learned (default: the
# package's). ASK: a folder with a file of prompts for each part, 1.jsonl ..., to answer beside the invented ones. TEXT: a
# folder with a file of conversations for each part, 1.jsonl.gz ..., to learn beside the answers. MAX_NEW_TOKENS: of an
# answer (default: 320). TRAIN_ON=answers leaves prompts out, and then the training runs no forward of the target: answering
# keeps the hidden states. DTYPE: of OUT's weights; int8 halves the folder, and drafts on a CPU stay the same.
set -euo pipefail
rounds=${1:-8} first=${FIRST:-1} start=${START:-}
for number in "$rounds" "$first"; do
    if ! [[ $number =~ ^[1-9][0-9]*$ ]]; then
        echo "ROUNDS and FIRST must be positive numbers, but one is '$number'" >&2
        exit 2
    fi
done
cd "$(dirname "$0")/.."
if [ -n "$start" ] && [ ! -e "$start" ]; then
    echo "START is '$start', but there is no such drafter" >&2
    exit 2
fi
. scripts/venv.sh
use_venv

target=${TARGET:-smollm2-135m}
name=$(basename "$target" .gguf)
config=${CONFIG:-$name} work=${WORK:-runs/$name-shipped} out=${OUT:-drafter/assets/$name}
evaluation=${EVALUATION:-evaluation} exclude=$work/exclude.jsonl
mkdir -p "$work"
cat drafter/assets/evaluation-prompts.jsonl drafter/assets/evaluation-prompts-code.jsonl ${EVALUATION:+"$EVALUATION"} > "$exclude"
case $target in */* | *.gguf) ;; *) drafter target fetch "$target" ;; esac

# Run a command unless it is finished; the log gets the name, the core-hours and the command's last line. A subshell, as
# bash would count the time of a background command that ends meanwhile.
stage() (
    name=$1 TIMEFORMAT='%U %S'
    shift
    if [ -e "$work/$name.done" ]; then exit; fi
    echo "== $name"
    { time "$@" > "$work/$name.out" 2> "$work/$name.err"; } 2> "$work/$name.time"
    echo "$name: $(awk '{ printf "%.3f", ($1 + $2) / 3600 }' "$work/$name.time") core-hours; $(tail -n 1 "$work/$name.out")" |
        tee -a "$work/log"
    mv "$work/$name.time" "$work/$name.done"
)

# Invent the prompts of a part and answer them, and answer those of a file.
answer() {
    stage "answers-$1" distill "$1" answers --prompts magpie --num-prompts "${PROMPTS:-1000}" --num-answers 2
    if [ -n "${ASK:-}" ]; then stage "asked-$1" distill "$1" asked --prompts "$ASK/$1.jsonl"; fi
}

#   distill PART NAME OPTIONS..
distill() {
    drafter distill --target "$target" --exclude "$exclude" --temperature 0,0.7 --max-num-seqs 64 --seed "$1" \
        --max-new-tokens "${MAX_NEW_TOKENS:-320}" --out "$work/$2-$1.jsonl" "${@:3}" \
        ${TRAIN_ON:+--states "$work/states-$1"}
}

# Learn the answers of a part at a constant rate, or while the rate falls, from the weights of a drafter (none: new ones).
#   learn PART DRAFTER
#   fall PART DRAFTER
learn() {
    stage "part-$1" train_part "$@" --trainer.max_epochs "${EPOCHS:-1}" --model.optim.decay_share 0 \
        --model.optim.warmup_steps "$([ -n "$2" ] && echo 15 || echo 100)"
}
fall() {
    stage "fall-part-$1" train_part "$@" --trainer.max_epochs 2 --model.optim.decay_share 1 --model.optim.warmup_steps 0
}

# The training and the export of a stage.
#   train_part PART DRAFTER OPTIONS..
train_part() {
    local part=$1 start=$2
    shift 2
    drafter train --target "$target" --config "$config" --train "$work/answers-$part.jsonl" \
        ${ASK:+--train "$work/asked-$part.jsonl"} ${TEXT:+--train "$TEXT/$part.jsonl.gz"} \
        --data.train_on "${TRAIN_ON:-everything}" --data.cache_hidden_states "$work/states-$part" --decode-prompts 0 \
        --out "$work/$name" ${start:+--model.init_from "$start"} --ckpt-path last "$@"
    drafter export "$work/$name/checkpoints/last.ckpt" --out "$work/$name/drafter"
    python -c 'import json, sys; print(json.load(open(sys.argv[1]))["settings"]["trained_positions"], "positions")' \
        "$work/$name/drafter/run.json"
}

# A function for both parts of the round side by side.
#   both FUNCTION ARGUMENTS..
both() {
    OMP_NUM_THREADS=$(((threads + 1) / 2))
    set -m # a process group of its own, which the trap ends
    "$1" $((2 * round)) "${@:2}" &
    beside=$!
    set +m
    "$1" $((2 * round - 1)) "${@:2}"
    wait "$beside"
    beside='' OMP_NUM_THREADS=$threads
}

# The mean of drafters as a stage.
#   mean NAME DRAFTER..
mean() {
    stage "$1" python scripts/average.py "${@:2}" --out "$work/$1"
}

# Tokens per step of a drafter after a round: a file of rows, written anew after an interruption.
#   measure ROUND DRAFTER COPYING..
measure() {
    rm -f "$work/acceptance-$1.jsonl"
    python scripts/acceptance.py "$2" --target "$target" --prompts "$evaluation" --tree "W4 L3 N8" "W8 L4 N24" \
        "W28 L5 N64" --copying "${@:3}" --results "$work/acceptance-$1.jsonl"
}

last=$((first + rounds - 1)) beside= learnt=() falls=()
threads=$(python -c 'import torch; print(torch.get_num_threads())')
export OMP_NUM_THREADS
# Else glibc gives memory back after each operation and asks for it again: hidden states take 1.4 times as long.
export MALLOC_MMAP_MAX_=0 MALLOC_TRIM_THRESHOLD_=4000000000
trap '[ -z "$beside" ] || kill -- "-$beside" 2> /dev/null || true' EXIT
for round in $(seq "$first" "$last"); do
    one=$((2 * round - 1)) two=$((2 * round))
    both answer
    if [ -n "$start" ]; then
        both learn "$start"
        ends=("$work/part-$one/drafter" "$work/part-$two/drafter")
    else
        learn "$one" ""
        learn "$two" "$work/part-$one/drafter"
        ends=("$work/part-$two/drafter")
    fi
    if [ -z "${START:-}" ]; then
        for part in "$one" "$two"; do
            learnt+=("$work/answers-$part.jsonl" ${ASK:+"$work/asked-$part.jsonl"} ${TEXT:+"$TEXT/$part.jsonl.gz"})
        done
        ends+=(--answers "${learnt[@]}")
    fi
    mean "round-$round" "${ends[@]}"
    start="$work/round-$round" measured=
    done=$((round - first + 1))
    if ((round == last || (done & (done - 1)) == 0)); then
        both fall "$start"
        mean "fall-$round" "$work/fall-part-$one/drafter" "$work/fall-part-$two/drafter"
        measured="$work/fall-$round" copying=off
    fi
    if [ -d "$work/fall-$round" ]; then falls+=("$work/fall-$round"); fi
    if ((round == last)); then
        made_of=("${falls[-1]}") copying="off on"
        if [ -n "${START:-}" ]; then
            made_of=("$START" "${falls[-1]}")
        elif ((${#falls[@]} > 2)); then
            made_of=("${falls[@]: -2}")
        fi
        if ((${#made_of[@]} == 2)); then
            mean "mean-$round" "${made_of[@]}"
            measured="$work/mean-$round"
        fi
    fi
    if [ -n "$measured" ]; then stage "measure-$round" measure "$round" "$measured" $copying; fi
    rm -rf "$work/states-$one" "$work/states-$two"
done

awk '{ sum += $2 } END { printf "all stages: %.1f core-hours\n", sum }' "$work/log"
python scripts/average.py "${made_of[@]}" --out "$out" --dtype "${DTYPE:-bfloat16}"
python - "$work" "$first" "$last" "${START:-}" "${TEXT:-}" "${made_of[@]}" >> "$out/README.md" << 'CARD'
import json, sys
from pathlib import Path

work, first, last, start = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
begin = f"from the weights of `{Path(start).name}`" if start else "from new weights"
read = "and other text" if sys.argv[5] else "alone"
parts = "the mean of " * (len(sys.argv) > 7) + " and ".join(f"`{Path(name).name}`" for name in sys.argv[6:])
print(f"\n## How it was made\n\n`scripts/train_shipped.sh`, rounds {first} to {last}, {begin}, from invented prompts {read}. A fall begins at the weights of all rounds before. The weights are {parts}.\n")
print("| stage | core-hours and result |\n|---|---|")
lines = [line.partition(": ") for line in (work / "log").read_text().splitlines()]
for name, _, result in lines:
    if "part" in name or name.startswith(("answers", "asked")):
        print(f"| {name} | {result} |")
positions = sum(int(result.split()[-2]) for name, _, result in lines if "part" in name)
print(f"\nIn all {positions / 1e6:.1f} million positions, those of earlier falls included.")
print("\n## How good it is\n\nGreedy answers of the target as it decodes on a CPU: tokens per step and standard error over prompts, after the rounds named, with and without copies from the text; the last are of these weights, those before of single falls:\n")
print("| after round | prompts | W | L | N | copies | tokens per step |\n|---|---|---|---|---|---|---|")
for number in range(first, last + 1):
    file = work / f"acceptance-{number}.jsonl"
    for row in map(json.loads, file.read_text().splitlines() if file.exists() else ()):
        cells = [row[name] for name in ("beam_width", "draft_length", "tree_size", "copying")]
        prompts = f"{row['num_prompts']} of {row['prompts']} x {row['max_new_tokens']}"
        cells.append(f"{row['tokens_per_step']} ± {row['standard_error']}")
        print("|", *(f"{cell} |" for cell in (number, prompts, *cells)))
CARD
