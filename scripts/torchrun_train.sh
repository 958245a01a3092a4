#!/usr/bin/env bash
# Train on several machines without a scheduler: run this on every one of them, with the same arguments.
#
#   NNODES=2 NODE_RANK=0 MASTER_ADDR=10.0.0.1 bash scripts/torchrun_train.sh --config FILE.yaml
#
# NODE_RANK counts the machines from 0; MASTER_ADDR is the address of machine 0. All other arguments go to
# `drafter train`. GPUS: processes per machine (default: its GPUs, or 1). The data and the target must be readable, and
# out writable, under the same path everywhere. Stopped by Ctrl-C or a failure, the run goes on with
# --ckpt-path last, also on another number of machines.
set -euo pipefail

nodes=${NNODES:-1}
gpus=${GPUS:-$(nvidia-smi --list-gpus 2>/dev/null | wc -l || true)}
[ "$gpus" -gt 0 ] || gpus=1

exec torchrun \
    --nnodes "$nodes" --nproc-per-node "$gpus" --node-rank "${NODE_RANK:-0}" \
    --master-addr "${MASTER_ADDR:-127.0.0.1}" --master-port "${MASTER_PORT:-29500}" \
    --no-python drafter train \
    --trainer.num_nodes "$nodes" --trainer.devices "$gpus" --trainer.strategy ddp "$@"
