"""A target that several processes run together: every process keeps a share of every layer (tensor parallelism).

`torchrun` starts the processes, one for each device. transformers splits the layers by the plan of the model's class:
attention by its heads, the MLP by its columns, two sums over all processes a layer. Embeddings and output matrix, which
others read directly, stay whole in every process, and so every process computes the same logits.

Process 0 leads: it alone talks to users. Its messages go to the others over the CPU, whatever device computes.
"""

import os
import time
import zlib
from array import array
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.distributed import DistributedConfig

# The leader may have nothing to say for as long as nobody asks a server anything.
_NEVER = timedelta(days=365)
# Processes that read their shares from a slow disk come to the first forward at different times.
_LONGEST_FORWARD = timedelta(minutes=30)


def leads() -> bool:
    """Whether this process talks to users: process 0 of those that `torchrun` has started, or the only one."""
    return int(os.environ.get("RANK", "0")) == 0


class Ranks:
    """The processes that run one target together.

    Attributes:
        rank: number of this process.
        size: number of processes.
    """

    def __init__(self) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self._group = dist.new_group(backend="gloo", timeout=_NEVER)

    @property
    def is_leader(self) -> bool:
        """Whether this process hands out the work."""
        return self.rank == 0

    def send(self, message: Any) -> None:
        """Hand a message to all others (leader only)."""
        dist.broadcast_object_list([message], src=0, group=self._group)

    def receive(self) -> Any:
        """The leader's next message; waits for as long as it takes."""
        box = [None]
        dist.broadcast_object_list(box, src=0, group=self._group)
        return box[0]

    def agree(self, emitted: Sequence[Sequence[int]]) -> None:
        """Compare the tokens of a step with those of the other processes.

        Args:
            emitted: the tokens of every row.

        Raises:
            RuntimeError: the processes do not have the same tokens.
        """
        words = array("q", [number for tokens in emitted for number in (len(tokens), *tokens)])
        sums = [torch.empty(1, dtype=torch.int64) for _ in range(self.size)]
        dist.all_gather(sums, torch.tensor([zlib.crc32(words.tobytes())]), group=self._group)
        if any(int(other) != int(sums[0]) for other in sums):
            time.sleep(1)  # all are to read the others' sums before the first process ends
            raise RuntimeError(
                f"the {self.size} processes of the target disagree about the tokens of a step (checksums "
                f"{', '.join(f'{int(other):08x}' for other in sums)}): are versions, files and devices the same?"
            )

    def least(self, number: int) -> int:
        """The smallest number of all processes, in all processes."""
        box = torch.tensor([number])
        dist.all_reduce(box, dist.ReduceOp.MIN, group=self._group)
        return int(box)

    def close(self) -> None:
        """Leave the group; the others are told that nothing more comes."""
        if self.is_leader:
            self.send(None)
        dist.destroy_process_group()


def join(num_ranks: int, device: str) -> torch.device:
    """Meet the other processes, and return the device of this one.

    Args:
        num_ranks: of ``--tensor-parallel``.
        device: of ``--device``.

    Raises:
        ValueError: `torchrun` has started another number of processes, or the device is not the machine's first kind.
    """
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size != num_ranks:
        raise ValueError(
            f"--tensor-parallel {num_ranks} needs {num_ranks} processes but {size} run: "
            f"torchrun --nproc-per-node {num_ranks} -m drafter COMMAND --tensor-parallel {num_ranks} ..."
        )
    accelerator = torch.accelerator.current_accelerator()
    kind = "cpu" if accelerator is None else accelerator.type
    if device not in ("auto", kind):
        raise ValueError(
            f"--device {device} with --tensor-parallel: transformers puts the processes on {kind} here: leave --device "
            "out" + (", and hide the GPUs with CUDA_VISIBLE_DEVICES= for a CPU" if device == "cpu" else "")
        )
    found = torch.device(kind)
    if kind == "cuda":
        found = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(found)
    if not dist.is_initialized():
        device_id = found if kind == "cuda" else None
        dist.init_process_group("nccl" if kind == "cuda" else "gloo", timeout=_LONGEST_FORWARD, device_id=device_id)
    return found


def load_parallel(place: Path | str, dtype: torch.dtype, shared: dict[str, Any], num_ranks: int) -> PreTrainedModel:
    """This process's share of a model, after :func:`join`.

    Args:
        place: folder or hub id.
        dtype: of the weights.
        shared: further arguments of ``from_pretrained``.
        num_ranks: processes that share the layers.

    Raises:
        ValueError: transformers cannot split this model over so many processes.
    """
    config = AutoConfig.from_pretrained(place, **shared)
    _check_heads(config.get_text_config(decoder=True), num_ranks)
    with torch.device("meta"):
        skeleton = AutoModelForCausalLM.from_config(config, trust_remote_code=shared["trust_remote_code"])
    if not any(style in ("colwise", "rowwise") for style in (skeleton.tp_plan or {}).values()):
        raise ValueError(
            f"--tensor-parallel {num_ranks}: transformers has no plan to split models of type {config.model_type}"
        )
    whole = (skeleton.get_input_embeddings(), skeleton.get_output_embeddings())
    plan = {path: "replicate" for path, module in skeleton.named_modules() if _is_one_of(module, whole)}
    return AutoModelForCausalLM.from_pretrained(
        place,
        dtype=dtype,
        use_safetensors=True,
        attn_implementation="sdpa",
        distributed_config=DistributedConfig(tp_size=num_ranks, tp_plan=plan),
        **shared,
    )


def _is_one_of(module: nn.Module, others: Sequence[nn.Module | None]) -> bool:
    return any(module is other for other in others)


def _check_heads(config: Any, num_ranks: int) -> None:
    """ValueError where attention cannot be split: transformers would load the model and fail in its first forward."""
    num_heads = int(config.num_attention_heads)
    for what, count in (
        ("key/value heads", int(getattr(config, "num_key_value_heads", None) or num_heads)),
        ("attention heads", num_heads),
    ):
        if count % num_ranks:
            raise ValueError(
                f"--tensor-parallel {num_ranks} cannot split {count} {what} evenly: give a number that divides {count}"
            )
