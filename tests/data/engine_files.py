"""Files of hidden states as vLLM and speculators write them, made by the tests."""

from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from drafter.data.rows import TokenRows
from drafter.targets.capabilities import decoder_of
from drafter.targets.target import Target


@torch.no_grad()
def states_before_norm(target: Target, token_T: Tensor, layers: Sequence[int]) -> Tensor:
    """[T, L, D]: the inputs of these layers, then the output of the last layer before the final norm."""
    seen: list[Tensor] = []
    decoder = decoder_of(target.model)
    hook = decoder.norm.register_forward_pre_hook(lambda module, given: seen.append(given[0]))
    output = decoder(input_ids=token_T.long()[None], use_cache=False, output_hidden_states=True)
    hook.remove()
    return torch.stack([*(output.hidden_states[layer][0] for layer in layers), seen[0][0]], dim=1)


def write_file(path: Path, state_TAD: Tensor, token_T: Tensor, *, is_float8: bool = False) -> None:
    """One text. In float8 every token has one scale over all its layers, as speculators' FP8 connector writes it."""
    tensors = {"hidden_states": state_TAD.contiguous(), "token_ids": token_T.long()}
    if is_float8:
        largest = torch.finfo(torch.float8_e4m3fn).max
        scale_T11 = (state_TAD.float().abs().amax(dim=(1, 2), keepdim=True) / largest).clamp(min=1e-12)
        tensors["hidden_states"] = (state_TAD.float() / scale_T11).to(torch.float8_e4m3fn)
        tensors["hidden_states_scales"] = scale_T11
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file(tensors, path)


def write_speculators(
    folder: Path, rows: TokenRows, target: Target, layers: Sequence[int] = (), *, is_float8: bool = False
) -> None:
    """``hs_{i}.safetensors`` of whole rows."""
    for number, (token_T, _) in enumerate(rows.take(range(len(rows)))):
        state_TAD = states_before_norm(target, token_T, layers)
        write_file(folder / f"hs_{number}.safetensors", state_TAD, token_T, is_float8=is_float8)


def write_vllm(folder: Path, rows: TokenRows, target: Target, layers: Sequence[int] = ()) -> None:
    """Files named by requests that wrote the answers: no state for the last answer token and what stands behind."""
    for number, (token_T, loss_mask_T) in enumerate(rows.take(range(len(rows)))):
        token_T = token_T[: int(loss_mask_T.nonzero()[-1])]
        path = folder / f"chatcmpl-{97 * number % 89:x}{number}.safetensors"
        write_file(path, states_before_norm(target, token_T, layers), token_T)
        path.with_name(path.name + ".lock").touch()  # vLLM leaves the lock files
