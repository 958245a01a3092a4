"""`drafter export`: a drafter leaves its training run, for us and for other tools."""

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

from drafter.utils.options import Options


@dataclass(frozen=True, kw_only=True)
class ExportOptions(Options):
    """Turn a training checkpoint into a drafter folder.

    The folder holds config.json, model.safetensors, run.json, a model card, and a script for model.generate of
    transformers. The folder is complete or not there at all. --format apple writes the published format, which Apple's
    ml-recurrent-drafter and TensorRT-LLM's converter read. --format vllm writes the folder that vLLM serves with.

    Attributes:
        checkpoint: a .ckpt file of `drafter train`; with --format apple or vllm also a drafter folder
        out: folder to write
        format: drafter, our own; apple, the published one; vllm, for vLLM with this package as its plug-in
        dtype: number format of the weights; int8 rounds matrices as decoding on a CPU does, which drafts the same from
            half of the bytes
        target: with --format apple or vllm: the drafter's target, where the training run's name does not find it
        copying: with --format vllm: mix the drafts with copies from the text
    """

    positional: ClassVar = "checkpoint"
    checkpoint: Path
    out: Path
    format: Literal["drafter", "apple", "vllm"] = "drafter"
    dtype: Literal["bfloat16", "float32", "int8"] = "bfloat16"
    target: str | None = None
    copying: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.format == "drafter" and self.target is not None:
            raise ValueError("--target belongs to the formats for other programs: add --format apple or --format vllm")
        if self.format != "drafter" and self.dtype == "int8":
            raise ValueError(f"--dtype int8 is for our own format: give --format {self.format} another one")
        if self.format != "vllm" and not self.copying:
            raise ValueError("--no-copying belongs to the drafter's folder for vLLM: add --format vllm")


def export(options: ExportOptions) -> None:
    """Run `drafter export`."""
    from drafter.integrations.export import export as write

    given = dict(vars(options))
    print(write(given.pop("checkpoint"), **given))
