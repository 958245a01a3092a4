"""The fingerprint: one for a model in memory, its files and a GGUF file, and another for a fine-tuning."""

from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import gguf
import pytest
import torch
from safetensors.torch import save_file

from drafter.models.config import DrafterConfig
from drafter.models.drafter import check_target
from drafter.runtimes.loading import load_target, wrap_model
from drafter.targets.fingerprint import ends_in_files, fingerprint_of
from drafter.targets.gguf_file import convert_gguf
from drafter.utils.fingerprint import NUM_OUTPUT_DIGITS, same_fingerprint
from tests.data.tiny import save_target, tiny_target
from tests.targets.tiny_gguf import write_gguf


def test_model_and_files_have_one_fingerprint_in_every_number_format(tmp_path: Path) -> None:
    target = tiny_target()
    folder = save_target(target, tmp_path / "whole")
    assert load_target(folder, device="cpu").fingerprint == target.fingerprint
    assert load_target(folder, device="cpu", dtype="float16").fingerprint == target.fingerprint
    for name in ("consolidated", "adapter_model"):  # beside the model's own files
        save_file({"layers.0.attention.wq.weight": torch.ones(2, 2)}, tmp_path / "whole" / f"{name}.safetensors")
    assert load_target(folder, device="cpu").fingerprint == target.fingerprint
    target.model.half()
    copy = save_target(target, tmp_path / "half", max_shard_size="5KB")
    assert same_fingerprint(load_target(copy, device="cpu", dtype="float32").fingerprint, target.fingerprint)


def ends_in_gguf(file: Path) -> Iterator[tuple[str, float, float]]:
    """The ends of the matrices as the file has them."""
    for tensor in gguf.GGUFReader(file).tensors:
        if tensor.name.startswith("blk.") and len(tensor.shape) > 1:
            rows = tensor.data.reshape(-1, tensor.data.shape[-1])
            first, last = (gguf.quants.dequantize(row, tensor.tensor_type).flat for row in (rows[:1], rows[-1:]))
            yield tensor.name, float(first[0]), float(last[-1])


def test_a_gguf_file_has_the_fingerprint_of_its_folder(tmp_path: Path) -> None:
    """Which has the rows of queries and keys in another order."""
    for matrices in ("F32", "Q4_1"):
        file = write_gguf(tmp_path / f"{matrices}.gguf", matrices=matrices)
        (tmp_path / matrices).mkdir()
        convert_gguf(file, tmp_path / matrices)
        output_VD = torch.ones(40, 8)
        ends = ends_in_files([tmp_path / matrices / "model.safetensors"])
        assert fingerprint_of(output_VD, ends) == fingerprint_of(output_VD, ends_in_gguf(file))


@pytest.mark.parametrize("part", ["self_attn.q_proj", "mlp.down_proj"])
def test_a_fine_tuning_that_leaves_the_output_matrix_is_another_target(part: str, caplog) -> None:
    base, tuned = tiny_target(num_hidden_layers=6), tiny_target(num_hidden_layers=6)
    shape = {"vocab_size": base.vocab_size, "hidden_size": base.hidden_size, "target_name": "base"}
    config = DrafterConfig(**shape, target_fingerprint=base.fingerprint)
    old = DrafterConfig(**shape, target_fingerprint=base.fingerprint[:NUM_OUTPUT_DIGITS])  # of the output matrix alone
    check_target(config, base)
    assert not caplog.text
    for share, is_refused in ((0.1, False), (1.0, True)):  # a light one, as another quantisation, draws a line
        with torch.no_grad(), torch.random.fork_rng():
            torch.manual_seed(0)
            for name, weight in tuned.model.named_parameters():
                if part in name:
                    weight += share * weight.std() * torch.randn_like(weight)
        changed = wrap_model(tuned.model, tuned.tokenizer, name="tuned")
        wrong = pytest.raises(ValueError, match="for target 'base' and cannot draft for 'tuned': their weights")
        with wrong if is_refused else nullcontext():
            check_target(config, changed)
        check_target(old, changed)
    assert caplog.text.count("'tuned' has its weights rounded otherwise") == 1
