"""RecurrentDrafter: a small recurrent head that predicts the next tokens of a target.

Given h, the target's final hidden state at the last committed token, and the root token x_1 (chosen by the target, not
yet read by it), the drafter reads the target's own input embeddings e:

    s_0 = 0;  s_k = cell(e(x_k), s_{k-1});  logits_k = head(ResBlocks([h; s_k]))  predicts x_{k+1}.

h stays the same over the steps. Source: Recurrent Drafter, arXiv 2403.09919.

Shapes: X any leading dimensions (rows, beams, text positions) · L steps · C context size · D hidden size · E = 2D ·
A fused layers but the last · F feature size of the head · V target vocabulary · R draft vocabulary.
"""

import logging
import math
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.utils import CONFIG_NAME, cached_file

from drafter.kernels import native
from drafter.models.config import DrafterConfig
from drafter.models.files import WEIGHTS, check_tensors, read_tensors, round_tensors
from drafter.utils.fingerprint import distance, same_fingerprint
from drafter.utils.io import printable
from drafter.utils.parse import read_json_object

_log = logging.getLogger(__name__)
# Of the weights' samples of two targets: files of one model in 3 to 8 bits differ by 0.08 and cost a drafter little.
_MOST_DISTANCE = 0.15


class RnnCell(nn.Module):
    """The published cell: s' = SiLU(W e + U s + b) (arXiv 2403.09919). ``embedding_scale`` makes W e as large as U s
    from the first step of training, and folds into W for export.
    """

    def __init__(self, hidden_size: int, embedding_scale: float) -> None:
        super().__init__()
        self.embedding_scale = embedding_scale
        self.w = nn.Linear(hidden_size, hidden_size, bias=False)
        self.u = nn.Linear(hidden_size, hidden_size, bias=True)

    def forward(self, embedding_XD: Tensor, state_XD: Tensor) -> Tensor:
        """Embedding [..., D], state [..., D] -> next state [..., D]."""
        return F.silu(self.w(embedding_XD * self.embedding_scale) + self.u(state_XD))


class ResBlock(nn.Module):
    """x + SiLU(linear(x)): the residual in the target's own units, scaled input for the layer, narrow by a rank."""

    def __init__(self, size: int, rank: int | None) -> None:
        super().__init__()
        self.down = None if rank is None else nn.Linear(size, rank, bias=False)
        self.linear = nn.Linear(size if rank is None else rank, size)

    def forward(self, x_XE: Tensor, scaled_XE: Tensor) -> Tensor:
        """The stream [..., E] and the same scaled for linear layers -> the stream [..., E]."""
        narrow = scaled_XE if self.down is None else self.down(scaled_XE)
        return x_XE + F.silu(self.linear(narrow))


def _unbind(drafter: "RecurrentDrafter", _: Any) -> None:
    """The output rows of a drafter that has loaded other weights may be those of another draft vocabulary."""
    drafter._bound = None


class Rounded(NamedTuple):
    cell: native.Matrix
    downs: list[native.Matrix]
    blocks: list[native.Matrix]
    head: native.Matrix  # of a tied head, else none
    output: native.Matrix  # the output matrix over the draft vocabulary


class RecurrentDrafter(nn.Module):
    """The drafter, a plain module with the methods of transformers' models that it needs: the base class of those
    models takes two seconds to import, at every start of a command.
    """

    config_class = DrafterConfig  # read by transformers' AutoModel

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.config = config
        self.name_or_path = ""
        size = config.hidden_size
        self.fuse_context = nn.Linear(config.context_size, size, bias=False) if config.context != "last" else None
        self.cell = RnnCell(size, config.embedding_scale)
        self.blocks = nn.ModuleList(ResBlock(2 * size, config.block_rank) for _ in range(config.num_res_blocks))
        self.head = nn.Linear(2 * size, size if config.head == "tied" else config.num_outputs, bias=False)
        # Draft index -> target token id, ascending; the identity when R == V.
        self.register_buffer("draft_token_ids_R", torch.empty(config.num_outputs, dtype=torch.int64))
        self.draft_token_ids_R: Tensor
        # Of the target, for a tied head: set by `bind`, and not in the state dict.
        self.output_rows_RD: Tensor | None = None
        self._bound: weakref.ref[Any] | None = None  # their target; None again where the draft vocabulary has changed
        self.register_load_state_dict_post_hook(_unbind)
        self._rounded: Rounded | None = None
        self.is_packed = False
        self._init_weights()

    @torch.no_grad()
    def _init_weights(self) -> None:
        """The head starts small (nearly uniform logits), every other layer as torch starts a linear layer, so that the
        first gradients meet useful random features of [h; s] instead of zeros.
        """
        if self.head.weight.is_meta:
            return  # torch would import its compiler to draw numbers for shapes: a second of each start
        self.draft_token_ids_R.copy_(torch.arange(len(self.draft_token_ids_R)))
        nn.init.normal_(self.head.weight, std=0.1 / math.sqrt(self.head.in_features))
        if self.fuse_context is not None:
            # Starts as the final hidden state alone, which is the last of the layers.
            size = self.config.hidden_size
            self.fuse_context.weight.zero_()
            self.fuse_context.weight[:, -size:] = torch.eye(size)

    @classmethod
    def from_apple(cls, folder: str | Path) -> Self:
        """A drafter in the published format, for any target of its sizes (OSError; ValueError: no counterpart here)."""
        from drafter.models.apple_format import config_from_apple, from_apple

        config = config_from_apple(read_json_object(Path(folder, CONFIG_NAME)))
        return cls.from_tensors(config, from_apple(config, read_tensors(Path(folder, WEIGHTS))), str(folder))

    @classmethod
    def from_pretrained(
        cls,
        name: str | Path,
        *,
        dtype: torch.dtype | None = None,
        revision: str | None = None,
        config: DrafterConfig | None = None,
        **kwargs: Any,
    ) -> Self:
        """Read and check an exported folder, or ``owner/name`` of the hub. ``dtype`` None: as in the file. ``config``
        and further arguments are those of ``AutoModel``, and change nothing. ValueError: a file is damaged, or config
        and tensors do not make a drafter; one line names the part. OSError: there is no such folder.
        """
        folder = Path(name)
        if not folder.is_dir():
            folder = Path(str(cached_file(str(name), WEIGHTS, revision=revision))).parent
            cached_file(str(name), CONFIG_NAME, revision=revision)
        if not (folder / CONFIG_NAME).is_file():
            raise FileNotFoundError(f"{folder} holds no {CONFIG_NAME}: give a folder that `drafter export` made")
        config = DrafterConfig.from_fields(read_json_object(folder / CONFIG_NAME), str(folder / CONFIG_NAME))
        drafter = cls.from_tensors(config, read_tensors(folder / WEIGHTS), str(folder / WEIGHTS))
        drafter.name_or_path = str(name)
        if dtype is not None:
            drafter.to(dtype)
        return drafter

    @classmethod
    def from_tensors(cls, config: DrafterConfig, tensors: Mapping[str, Tensor], where: str) -> Self:
        """A drafter in eval mode of these tensors; ValueError naming `where` and the tensor that does not fit."""
        with torch.device("meta"):  # shapes alone: no memory is taken before the tensors fit
            drafter = cls(config)
        check_tensors(tensors, drafter.state_dict(), config.vocab_size, where)
        drafter.load_state_dict(dict(tensors), assign=True)
        return drafter.eval()

    def save_pretrained(self, folder: str | Path, *, is_rounded: bool = False) -> None:
        """Write weights, in 8 bits if ``is_rounded``, and config for :meth:`from_pretrained` (OSError: no access)."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        self.config.dtype, self.config.architectures = self.dtype, [type(self).__name__]
        tensors = {name: tensor.contiguous() for name, tensor in self.state_dict().items()}
        save_file(round_tensors(tensors) if is_rounded else tensors, folder / WEIGHTS, metadata={"format": "pt"})
        self.config.save_pretrained(folder)

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        return next(self.parameters()).dtype

    def bind(self, target: Any) -> Self:
        """Check that this is the drafter's target (ValueError that names both if not) and, for a tied head, take its
        output rows: one contiguous tensor. Call again after a move of the drafter to another device or dtype.
        """
        check_target(self.config, target)
        if self.config.head == "tied" and not self._is_bound(target):
            self._bound = weakref.ref(target)
            is_whole = len(self.draft_token_ids_R) == self.config.vocab_size
            runtime = target.runtime
            rows_RD = runtime.output_weight_VD if is_whole else runtime.output_rows(self.draft_token_ids_R)
            self.output_rows_RD = rows_RD.detach().to(self.device, self.dtype).contiguous()
            self._rounded = None
        return self

    def _is_bound(self, target: Any) -> bool:
        """Whether the output rows are this target's, for the present draft vocabulary, device and dtype."""
        rows_RD = self.output_rows_RD
        if rows_RD is None or self._bound is None or self._bound() is not target:
            return False
        return (rows_RD.device, rows_RD.dtype) == (self.device, self.dtype)

    def pack(self) -> Self:
        """Let the native search draft in 4 bits, where there is one; the weights must not change any more."""
        self.is_packed = True
        return self

    def rounded(self) -> "Rounded":
        if self._rounded is None:
            parts: list[Any] = list(self.blocks)
            self._rounded = Rounded(
                native.round_matrix(torch.cat([self.cell.w.weight, self.cell.u.weight], dim=1), self.cell.u.bias),
                [native.round_matrix(part.down.weight) for part in parts if part.down is not None],
                [native.round_matrix(part.linear.weight, part.linear.bias) for part in parts],
                native.round_matrix(self.head.weight) if self.config.head == "tied" else native.NO_MATRIX,
                native.round_matrix(self.output_rows()),
            )
        return self._rounded

    def set_scales(self, hidden_scale: float, embedding_scale: float) -> Self:
        """Set the constants that bring h and e to rms 1 (see DrafterConfig)."""
        self.config.hidden_scale = hidden_scale
        self.config.embedding_scale = self.cell.embedding_scale = embedding_scale
        return self

    def set_draft_token_ids(self, token_ids_R: Tensor) -> Self:
        """Set the draft vocabulary: int64 [R] target token ids, ascending, each once; any number for a tied head."""
        assert bool((token_ids_R.diff() > 0).all())
        if len(token_ids_R) != len(self.draft_token_ids_R):
            assert self.config.head == "tied"
            self.config.draft_vocab_size = len(token_ids_R)
        self.draft_token_ids_R = token_ids_R.to(self.draft_token_ids_R.device)
        self._bound = None
        return self

    @property
    def compute_dtype(self) -> torch.dtype:
        """The dtype that linear layers give: the parameters', or autocast's where that is on (training)."""
        device_type = self.device.type
        return torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else self.dtype

    def init_state(self, context_XC: Tensor) -> Tensor:
        """State before the root: zeros [..., D] for contexts [..., C]."""
        return context_XC.new_zeros((*context_XC.shape[:-1], self.config.hidden_size), dtype=self.compute_dtype)

    def step(self, state_XD: Tensor, embedding_XD: Tensor) -> Tensor:
        """Feed one token: states [..., D], input embeddings [..., D] -> next states [..., D]."""
        return self.cell(embedding_XD.to(state_XD.dtype), state_XD)

    def fuse(self, context_XC: Tensor) -> Tensor:
        """The part of the context that the head reads: [..., C] -> [..., D]. The last of several layers is normalised
        by the target; the residual streams of the others are brought to the rms of a final hidden state.
        """
        if self.fuse_context is None:
            return context_XC.to(self.compute_dtype)
        lower_XAD = context_XC[..., : -self.config.hidden_size].unflatten(-1, (-1, self.config.hidden_size)).float()
        lower_XAD = F.rms_norm(lower_XAD, lower_XAD.shape[-1:], eps=1e-6) / self.config.hidden_scale
        last_XD = context_XC[..., -self.config.hidden_size :]
        context_XC = torch.cat([lower_XAD.flatten(-2).to(last_XD.dtype), last_XD], dim=-1)
        return self.fuse_context(context_XC.to(self.compute_dtype))

    def features(self, hidden_XD: Tensor, state_XD: Tensor) -> Tensor:
        """Factors of the output rows: fused contexts [..., D], states [..., D] -> [..., F]. F is D for a tied head
        (after the projection), and 2D for a full head, whose own rows are ``head.weight``.
        """
        x_XE = torch.cat([hidden_XD.expand(state_XD.shape), state_XD.to(hidden_XD.dtype)], dim=-1)
        for block in self.blocks:
            x_XE = block(x_XE, self._scaled(x_XE))
        scaled_XE = self._scaled(x_XE)
        return scaled_XE if self.config.head == "full" else self.head(scaled_XE)

    def output_rows(self) -> Tensor:
        """Output matrix over the draft vocabulary [R, F]: the target's rows (tied), or the drafter's own."""
        if self.config.head == "full":
            return self.head.weight
        assert self.output_rows_RD is not None, "a tied head needs bind(target) before it can give logits"
        return self.output_rows_RD

    def logits(self, context_XC: Tensor, state_XD: Tensor) -> Tensor:
        """Logits over the draft vocabulary [..., R] for contexts [..., C] and states [..., D], whose leading dimensions
        broadcast. Index r stands for target token ``draft_token_ids_R[r]``.
        """
        feature_X = self.features(self.fuse(context_XC), state_XD)
        if self.config.head == "full":
            return self.head(feature_X)
        return F.linear(feature_X, self.output_rows())

    def forward(self, context_XC: Tensor, embedding_XLD: Tensor) -> Tensor:
        """Logits [..., L, R] after each of L known tokens with embeddings [..., L, D]."""
        states = [self.init_state(context_XC)]
        for embedding_XD in embedding_XLD.unbind(dim=-2):
            states.append(self.step(states[-1], embedding_XD))
        return self.logits(context_XC.unsqueeze(-2), torch.stack(states[1:], dim=-2))

    def _scaled(self, x_XE: Tensor) -> Tensor:
        """The stream for linear layers, with the h half times ``hidden_scale``."""
        scale = self.config.hidden_scale
        if scale == 1.0:
            return x_XE
        hidden_XD, state_XD = x_XE.chunk(2, dim=-1)
        return torch.cat([hidden_XD * scale, state_XD], dim=-1)


def check_target(config: DrafterConfig, target: Any) -> None:
    """Check that this is the drafter's target; ValueError that names both targets if not."""
    mine = f"the drafter was trained for target {printable(config.target_name or 'unknown', 100)!r}"
    for what, wanted, found in (
        ("vocabulary", config.vocab_size, target.vocab_size),
        ("hidden size", config.hidden_size, target.hidden_size),
    ):
        if wanted != found:
            raise ValueError(f"{mine} ({what} {wanted}) and cannot draft for {target.name!r} ({what} {found})")
    written = config.target_fingerprint
    is_same = not written or same_fingerprint(written, target.fingerprint)
    if not is_same and not distance(written, target.fingerprint) <= _MOST_DISTANCE:  # NaN is refused
        raise ValueError(
            f"{mine} and cannot draft for {target.name!r}: their weights differ; "
            "give the target it was trained for (--target), or train a drafter for this one"
        )
    if not is_same or written.partition("-")[2] != target.fingerprint.partition("-")[2]:
        _log.warning("%s, and %r has its weights rounded otherwise: fewer drafts may be accepted", mine, target.name)
