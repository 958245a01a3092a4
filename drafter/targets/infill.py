"""Filling in the middle: the tokens of models that were trained to write what stands between a prefix and a suffix."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from drafter.targets.chat import Pieces

TOKEN_IDS = "infill_token_ids"  # key of a tokenizer's own settings: token ids by a field of InfillTokens
# A GGUF file's keys tokenizer.ggml.NAME_token_id, the latest names first.
GGUF_KEYS = {
    "prefix": ("fim_pre", "prefix"), "suffix": ("fim_suf", "suffix"), "middle": ("fim_mid", "middle"),
    "repository": ("fim_rep",), "file": ("fim_sep",), "padding": ("fim_pad",),
}  # fmt: skip
_FIELDS = ("prefix", "suffix", "middle", "repository", "file", "padding")
_VOCABULARIES = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|repo_name|>", "<|file_sep|>", "<|fim_pad|>"),  # Qwen
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", None, "<|file_separator|>", None),  # CodeGemma
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>", "<repo_name>", "<file_sep>", "<fim_pad>"),  # StarCoder 2
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>", "<reponame>", "<filename>", "<fim_pad>"),  # StarCoder, Granite
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>", None, None, None),  # DeepSeek Coder
    ("▁<PRE>", "▁<SUF>", "▁<MID>", None, None, "▁<EOT>"),  # Code Llama
    ("[PREFIX]", "[SUFFIX]", None, None, None, None),  # Codestral, whose suffix stands first
)
_FURTHER_ENDS = ("<|endoftext|>", "<|end_of_text|>", "<｜end▁of▁sentence｜>")


class InfillTokens(NamedTuple):
    """Token ids; without ``middle`` the suffix stands first, and the answer follows the prefix."""

    prefix: int
    suffix: int
    middle: int | None
    repository: int | None
    file: int | None
    ends: tuple[int, ...]  # that end a filling, besides the target's own ends: of a text, of a file, and padding

    @classmethod
    def of(cls, tokenizer: Any) -> "InfillTokens | None":
        """The tokens that the tokenizer's file names, else known names of its vocabulary; None without any."""
        vocabulary: Mapping[str, int] = tokenizer.get_vocab()
        found = dict(tokenizer.init_kwargs.get(TOKEN_IDS) or {})
        for names in _VOCABULARIES:
            if all(name is None or name in vocabulary for name in names[:3]):
                pairs = zip(_FIELDS, names, strict=True)
                found = {field: vocabulary[name] for field, name in pairs if name and name in vocabulary} | found
                break
        if not {"prefix", "suffix"} <= found.keys():
            return None
        ends = [*(found.get(name) for name in _FIELDS[::-1]), *map(vocabulary.get, _FURTHER_ENDS)]
        own = [found.get(name) for name in _FIELDS[:5]]
        return cls._make([*own, tuple(token for token in ends if token is not None)])

    def around(self, prefix: str, suffix: str) -> Pieces:
        """The prompt for the text between a prefix and a suffix."""
        if self.middle is None:
            return self.suffix, suffix, self.prefix, prefix
        return self.prefix, prefix, self.suffix, suffix, self.middle

    def context(self, files: Sequence[tuple[str, str]]) -> list[Pieces]:
        """What stands before the prompt, in the form of a repository: a head, and an entry for each (name, text)."""
        if self.file is None:
            return [("",), *((f"\n\n--- {name} ---\n\n{text}",) for name, text in files), ("",)]
        head: Pieces = ("",) if self.repository is None else (self.repository, "repository\n")
        return [head, *((self.file, f"{name}\n{text}") for name, text in files), (self.file, "current\n")]
