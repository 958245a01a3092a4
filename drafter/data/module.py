"""ChatDataModule: files in, batches out, for Lightning."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from lightning.pytorch import LightningDataModule
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor

from drafter.data.encode import RowEncoder, encode_files
from drafter.data.hidden_states import cache_states, open_stored_states
from drafter.data.loader import TrainLoader, ValLoader
from drafter.data.reading import digest_of_rows
from drafter.data.rows import TokenRows, split_by_prompt
from drafter.targets.catalog import load_tokenizer, vocab_size_of
from drafter.targets.target import Target
from drafter.utils.fingerprint import same_fingerprint
from drafter.utils.parse import read_json_object
from drafter.utils.validate import Range

_MIN_PROMPT = 2  # the token at the start of every text, and one token of the text


class ChatDataModule(LightningDataModule):
    """Batches of tokenised conversations in a deterministic order that a checkpoint can resume.

    `datasets` reads and tokenises the files once and keeps the token rows in its cache folder (HF_DATASETS_CACHE).
    Rows with ``prompt_token_ids`` and ``token_ids`` are trained on as they are. Rows of similar length share a batch of
    at most ``batch_tokens`` tokens, padding included. The position in the data is part of the trainer's checkpoint.

    Attributes:
        rows: after :meth:`setup` the rows of ``train``, with the loss mask of the loss, and the held-out rows, ``val``.
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
        foreign_answers: bool = False,
        revision: str | None = None,
        trust_remote_code: bool = False,
        cache_hidden_states: str | None = None,
        hidden_states: str | None = None,
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
            foreign_answers: train on answers although the settings file beside them names another target.
            revision: hub revision of the target.
            trust_remote_code: run the target's own tokenizer code.
            cache_hidden_states: folder for the target's hidden states, which are computed once and read in every epoch.
                The cache takes 2 bytes x hidden size per kept position, and rounds the states to bfloat16.
            hidden_states: folder of the target's hidden states that vLLM or speculators stored, read instead of
                computed. Every row needs a file with its tokens.
        """
        super().__init__()
        if hidden_states is not None and cache_hidden_states is not None:
            raise ValueError(
                f"--data.hidden_states {hidden_states} is read and --data.cache_hidden_states {cache_hidden_states} "
                "computed: give one of them"
            )
        Range(low=2, high=2**24).check("--data.max_length", max_length)
        Range(low=2).check("--data.batch_tokens", batch_tokens)
        if batch_tokens < max_length:
            raise ValueError(
                f"--data.batch_tokens {batch_tokens} must be at least --data.max_length {max_length}: "
                "raise one or lower the other"
            )
        if isinstance(val, float | int) and not 0 < val < 1:
            raise ValueError(f"--data.val {val} must be a share above 0 and below 1, or files to validate on")
        self._train_names = [train] if isinstance(train, str) else train
        if not self._train_names:
            raise ValueError("--data.train names no file")
        self._val_share = val if isinstance(val, float | int) else 0.0
        self._val_names = [val] if isinstance(val, str) else val if isinstance(val, list) else []
        self._target_name = target
        self._max_length, self._columns, self._batch_tokens = max_length, columns, batch_tokens
        self.train_on = train_on
        self._seed, self._foreign_answers = seed, foreign_answers
        self._loading: dict[str, Any] = {"revision": revision, "trust_remote_code": trust_remote_code}
        self._cache_folder, self._stored_folder = cache_hidden_states, hidden_states
        self.rows: dict[str, TokenRows] = {}
        self._with_states: Mapping[str, TokenRows] = {}
        self._loader: TrainLoader | None = None
        self._position: dict[str, Any] | None = None

    @cached_property
    def tokenizer(self) -> Any:
        """The target's tokenizer."""
        return load_tokenizer(self._target_name, **self._loading)

    @cached_property
    def summary(self) -> dict[str, Any]:
        """The training rows in numbers, and each file by name, with a hash of its bytes (None for data of the hub)."""
        files = {name: Path(name).is_file() for name in self._train_names}
        described = [
            {"name": Path(name).name if is_file else name, "sha256": digest_of_rows(name) if is_file else None}
            for name, is_file in files.items()
        ]
        rows = self.rows["train"]
        numbers = {"rows": len(rows), "trained_tokens": rows.num_trained_tokens, "train_on": self.train_on}
        return {"files": described, **numbers}

    def prepare_data(self) -> None:
        """Read the rows in one process; the others find them in the cache of `datasets`."""
        self.setup()

    def setup(self, stage: str | None = None) -> None:
        """Read the rows, unless they are read."""
        if self.rows:
            return
        train = self._read(self._train_names, "train")
        if self._val_names:
            val = self._read(self._val_names, "val")
        else:
            train, val = split_by_prompt(train, self._val_share)
        self.rows = {"train": replace(train, everything=self.train_on == "everything"), "val": val}

    def _read(self, names: list[str], what: str) -> TokenRows:
        name = self._target_name
        vocab_size = vocab_size_of(name, **self._loading)
        encoder = RowEncoder(self.tokenizer, name, self._max_length, self._columns, vocab_size)
        rows, report = encode_files(names, encoder)
        for line in report:
            rank_zero_info(f"{what}: {line}")
        return rows

    def train_dataloader(self) -> TrainLoader:
        self._loader = TrainLoader(self._source("train"), seed=self._seed, **self._batching())
        if self._position is not None:
            self._loader.load_state_dict(self._position)
        return self._loader

    def state_dict(self) -> dict[str, Any]:
        """The position in the training data, for a checkpoint."""
        return {} if self._loader is None else self._loader.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """The loader of the training data goes on at this position."""
        self._position = state_dict

    def val_dataloader(self) -> ValLoader:
        return ValLoader(self._source("val"), **self._batching())

    def _source(self, part: str) -> TokenRows:
        return self._with_states.get(part, self.rows[part])

    def cache_states(self, target: Target, *, draft_length: int, context_layers: Sequence[int] = ()) -> None:
        """Fill the hidden-state cache, if ``cache_hidden_states`` names a folder, or open the files of
        ``hidden_states``; to be called before the loaders.

        Batches then carry ``hidden_BTD`` (and ``context_BTC`` with ``context_layers``) in the target's dtype, and their
        rows begin ``draft_length + 1`` positions before the first token that is trained on.

        Raises:
            ValueError: another target wrote the answers, or unfit files of states.
        """
        self._check_writer(target)
        shape: dict[str, Any] = {"margin": draft_length + 1, "context_layers": context_layers}
        if self._stored_folder is not None:
            self._with_states = open_stored_states(self._stored_folder, self.rows, target, **shape)
        elif self._cache_folder is not None:
            shape["batch_tokens"] = self._batch_tokens
            folder = self._cache_folder
            self._with_states = {part: cache_states(folder, rows, target, **shape) for part, rows in self.rows.items()}

    def _check_writer(self, target: Target) -> None:
        """Refuse files of another target's answers, as the settings file beside them says, unless ``foreign_answers``.

        Raises:
            ValueError: names file and flag.
        """
        for name in [] if self._foreign_answers else [*self._train_names, *self._val_names]:
            settings = Path(f"{name}.settings.json")
            written = read_json_object(settings).get("target_fingerprint") if settings.is_file() else None
            if written is not None and not same_fingerprint(str(written), target.fingerprint):
                raise ValueError(
                    f"{name}: another target than {target.name!r} wrote these answers, as {settings.name} says: let "
                    "this one answer (`drafter distill`), or train on them with --data.foreign_answers true"
                )

    def val_prompts(self, num: int) -> list[list[int]]:
        """Token ids of the first ``num`` different held-out prompts, up to the opening of the first answer.

        Plain text has no prompt, so its first tokens become the prompt.

        Raises:
            ValueError: no held-out row is long enough for a prompt.
        """
        prompts = map(self.rows["val"].prompt_ids, range(len(self.rows["val"])))
        found = list(dict.fromkeys(tuple(prompt) for prompt in prompts if len(prompt) >= _MIN_PROMPT))
        if not found:
            raise ValueError(
                f"no held-out row gives a prompt of at least {_MIN_PROMPT} tokens with one to answer: hold longer rows "
                "out, or name files for --data.val"
            )
        return [list(prompt) for prompt in found[:num]]

    def token_counts(self, vocab_size: int) -> Tensor:
        """Number of answer tokens by id, int64 [vocab_size]."""
        return self.rows["train"].token_counts(vocab_size)

    def _batching(self) -> dict[str, int]:
        """Size of the batches, and the share of this process."""
        rank, world_size = (self.trainer.global_rank, self.trainer.world_size) if self.trainer is not None else (0, 1)
        return {"batch_tokens": self._batch_tokens, "rank": rank, "world_size": world_size}
