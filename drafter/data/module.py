"""ChatDataModule: files in, batches out, for Lightning."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from lightning.pytorch import LightningDataModule
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor

from drafter.data.encode import RowSettings, encode_files
from drafter.data.hidden_states import CachedStates, cache_states
from drafter.data.loader import TrainLoader, ValLoader
from drafter.data.rows import TokenRows, split_by_prompt
from drafter.data.stored_states import StoredFiles, StoredStates, open_stored_states
from drafter.targets.catalog import load_tokenizer, vocab_size_of
from drafter.targets.target import Target
from drafter.utils.validate import Range, require

_MIN_PROMPT = 2  # the token at the start of every text, and one token of the text
_MAX_TEXT_PROMPT = 32  # for plain text, which has no end of a prompt


class ChatDataModule(LightningDataModule):
    """Batches of tokenised conversations in a deterministic order that a checkpoint can resume.

    `datasets` reads and tokenises the files once and keeps the token rows in its cache folder (HF_DATASETS_CACHE).
    Rows with ``prompt_token_ids`` and ``token_ids`` are trained on as they are. Rows of similar length share a batch of
    at most ``batch_tokens`` tokens, padding included. The loader saves the position in the data in the trainer's
    checkpoint (``state_dict`` of a dataloader, Lightning >= 2.6).
    """

    def __init__(
        self,
        train: str | list[str],
        target: str,
        val: float | str | list[str] = 0.02,
        max_length: int = 1024,
        batch_tokens: int = 8192,
        train_on: Literal["answers", "everything"] = "answers",
        seed: int = 0,
        columns: dict[str, str] | None = None,
        revision: str | None = None,
        trust_remote_code: bool = False,
        cache_hidden_states: str | None = None,
        hidden_states: str | None = None,
        progress: bool = True,
    ) -> None:
        """
        Args:
            train: files (.jsonl, .json, both also .gz; .parquet, .csv) or hub data sets (owner/name:split).
            target: the model with the tokenizer and the chat template: alias, hub id, folder or .gguf file.
            val: share of the prompts to hold out of ``train``, with all their answers, or validation files.
            max_length: longest row in tokens; longer rows are cut.
            batch_tokens: largest product of rows and longest row of a batch, padding included.
            train_on: ``answers``, or ``everything``: prompts and template too, for ready text with a loss that compares
                distributions. Validation is on answers in both cases.
            seed: seed of the order of the rows.
            columns: our key to the files' key, such as {"prompt": "question"}.
            revision: hub revision of the target.
            trust_remote_code: run the target's own tokenizer code.
            cache_hidden_states: folder for the target's hidden states, which are computed once and read in every epoch.
                The cache takes 2 bytes x hidden size per kept position, and rounds the states to bfloat16.
            hidden_states: folder of the target's hidden states that vLLM or speculators stored, read instead of
                computed. Every row needs a file with its tokens.
            progress: show progress bars.
        """
        super().__init__()
        if hidden_states is not None and cache_hidden_states is not None:
            raise ValueError(
                f"--data.hidden_states {hidden_states} is read and --data.cache_hidden_states {cache_hidden_states} "
                "computed: give one of them"
            )
        require("--data.max_length", max_length, Range(low=2, high=2**24))
        require("--data.batch_tokens", batch_tokens, Range(low=2))
        if batch_tokens < max_length:
            raise ValueError(
                f"--data.batch_tokens {batch_tokens} must be at least --data.max_length {max_length}: "
                "raise one or lower the other"
            )
        if isinstance(val, float | int) and not 0 < val < 1:
            raise ValueError(f"--data.val {val} must be a share above 0 and below 1, or files to validate on")
        if train_on not in ("answers", "everything"):
            raise ValueError(f"--data.train_on {train_on!r} must be answers or everything")
        self._train_names = [train] if isinstance(train, str) else list(train)
        if not self._train_names:
            raise ValueError("--data.train names no file")
        self._val_share = float(val) if isinstance(val, float | int) else None
        self._val_names = [val] if isinstance(val, str) else list(val) if isinstance(val, list) else []
        self._target_name = target
        self._settings = RowSettings(max_length, columns)
        self._batch_tokens = batch_tokens
        self.train_on = train_on
        self._seed = seed
        self._loading: dict[str, Any] = {"revision": revision, "trust_remote_code": trust_remote_code}
        self._states_folder = cache_hidden_states
        self._stored_folder = hidden_states
        self._states: Mapping[str, CachedStates | StoredStates] = {}
        self._progress = progress

    @cached_property
    def tokenizer(self) -> Any:
        """The target's tokenizer."""
        return load_tokenizer(self._target_name, **self._loading)

    @property
    def train_rows(self) -> TokenRows:
        """All rows trained on, with the answers' loss mask."""
        return self._rows[0]

    @property
    def val_rows(self) -> TokenRows:
        """All held-out rows."""
        return self._rows[1]

    @cached_property
    def description(self) -> list[dict[str, Any]]:
        """Each training file by name, with a hash of its bytes (None for a data set of the hub)."""
        paths = [Path(name) for name in self._train_names]
        digests = [hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else None for path in paths]
        return [
            {"name": path.name if digest else name, "sha256": digest}
            for name, path, digest in zip(self._train_names, paths, digests, strict=True)
        ]

    def prepare_data(self) -> None:
        """Tokenise the files, in one process only."""
        _ = self._rows

    def setup(self, stage: str | None = None) -> None:
        """Open the token rows."""
        _ = self._rows

    def train_dataloader(self) -> TrainLoader:
        rows, states = self._source("train")
        return TrainLoader(rows, states, seed=self._seed, fingerprint=rows.digest(), **self._batching())

    def val_dataloader(self) -> ValLoader:
        rows, states = self._source("val")
        return ValLoader(rows, states, **self._batching())

    def cache_states(self, target: Target, *, draft_length: int, context_layers: Sequence[int] = ()) -> None:
        """Fill the hidden-state cache, if ``cache_hidden_states`` names a folder, or open the files of
        ``hidden_states``; to be called before the loaders.

        Batches then carry ``hidden_BTD`` (and ``context_BTC`` with ``context_layers``) in the target's dtype, and their
        rows begin ``draft_length + 1`` positions before the first token that is trained on.
        """
        if self._states_folder is None and self._stored_folder is None:
            return
        parts = {"train": self._trained_rows(), "val": self.val_rows}
        shape: dict[str, Any] = {"margin": draft_length + 1, "context_layers": context_layers}
        if self._stored_folder is not None:
            longest = max(int(rows.length_R.max()) for rows in parts.values())
            files = StoredFiles(self._stored_folder, longest=longest, progress=self._progress)
            self._states = {part: open_stored_states(files, rows, target, **shape) for part, rows in parts.items()}
        else:
            shape |= {"batch_tokens": self._batch_tokens, "progress": self._progress}
            folder = str(self._states_folder)
            self._states = {part: cache_states(folder, rows, target, **shape) for part, rows in parts.items()}

    def val_prompts(self, num: int) -> list[list[int]]:
        """Token ids of the first ``num`` different held-out prompts, up to the opening of the first answer.

        Plain text has no prompt, so its first tokens become the prompt.

        Raises:
            ValueError: no held-out row is long enough for a prompt.
        """
        rows = self.val_rows
        prompts: dict[tuple[int, ...], None] = {}
        for index in range(len(rows)):
            if len(prompts) == num:
                break
            prompt = rows.prompt_ids(index)
            if len(prompt) < _MIN_PROMPT:
                # The last token remains for the answer.
                prompt = rows.row(index).token_T[:-1][:_MAX_TEXT_PROMPT].tolist()
            if len(prompt) >= _MIN_PROMPT:
                prompts[tuple(prompt)] = None
        if not prompts:
            raise ValueError(
                f"no held-out row gives a prompt of at least {_MIN_PROMPT} tokens with one to answer: hold longer rows "
                "out, or name files for --data.val"
            )
        return [list(prompt) for prompt in prompts]

    def token_counts(self, vocab_size: int | None = None) -> Tensor:
        """Number of trained answer tokens by id, int64 [vocab_size] (default: the tokenizer's size).

        ValueError when a token is not below ``vocab_size``: tokenizer and model do not belong together.
        """
        size = len(self.tokenizer) if vocab_size is None else vocab_size
        counts = self.train_rows.token_counts(size)
        if len(counts) > size:
            raise ValueError(
                f"the training data hold token {len(counts) - 1}, but the target has {size}: "
                f"{self._target_name!r} is not the target's tokenizer"
            )
        return counts

    def _batching(self) -> dict[str, int]:
        """Size of the batches, and the share of this process."""
        rank, world_size = (self.trainer.global_rank, self.trainer.world_size) if self.trainer is not None else (0, 1)
        return {"batch_tokens": self._batch_tokens, "rank": rank, "world_size": world_size}

    def _trained_rows(self) -> TokenRows:
        rows = self.train_rows
        return rows.trained_on_everything() if self.train_on == "everything" else rows

    def _source(self, part: str) -> tuple[TokenRows, CachedStates | StoredStates | None]:
        """The rows of ``train`` or ``val``, and the reader of their states, if states are on disk."""
        if self._states_folder is None and self._stored_folder is None:
            return (self._trained_rows() if part == "train" else self.val_rows), None
        if part not in self._states:
            raise ValueError("hidden states on disk: the cache is not made yet; call cache_states(target) first")
        return self._states[part].rows, self._states[part]

    @cached_property
    def _rows(self) -> tuple[TokenRows, TokenRows]:
        train = self._read(self._train_names, "train")
        if self._val_share is None:
            return train, self._read(self._val_names, "val")
        kept, held_out = split_by_prompt(train, self._val_share)
        return train.select(kept), train.select(held_out)

    def _read(self, names: list[str], what: str) -> TokenRows:
        name = self._target_name
        settings = replace(self._settings, vocab_size=vocab_size_of(name, **self._loading))
        rows, report = encode_files(names, self.tokenizer, settings, target_name=name, progress=self._progress)
        for line in report.lines():
            rank_zero_info(f"{what}: {line}")
        return rows
