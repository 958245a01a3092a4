"""A byte-level BPE tokenizer and a target over it, in memory; rows; and states as vLLM hands them over."""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from drafter.data.encode import EncodedRow, RowEncoder, row_features
from drafter.data.reading import RawRow
from drafter.data.rows import TokenRows
from drafter.runtimes.loading import wrap_model
from drafter.runtimes.torch.capabilities import decoder_of
from drafter.targets.target import Target

BOS, USER, ANSWER, END = "<s>", "<|user|>", "<|bot|>", "<|end|>"

# A turn: header, newline, content, end mark, newline.
CHAT_TEMPLATE = (
    "{{ '<s>' }}{% for m in messages %}{% if m['role'] == 'user' %}{{ '<|user|>\n' + m['content'] + '<|end|>\n' }}"
    "{% elif m['role'] == 'system' %}{{ m['content'] + '\n' }}"
    "{% else %}{{ '<|bot|>\n' + m['content'] + '<|end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|bot|>\n' }}{% endif %}"
)

# Merges that join whatever stands next to each other, header and answer too: a newline pair is one token.
_MERGES = [("Ċ", "Ċ"), ("t", "h"), ("th", "e"), ("Ġ", "the"), ("a", "n"), ("an", "d"), ("Ġ", "and")]


def tiny_tokenizer(chat_template: str | None = CHAT_TEMPLATE) -> PreTrainedTokenizerFast:
    """Every byte is a token, and a few pairs are; specials ``<s> <|user|> <|bot|> <|end|>`` are ids 0 to 3."""
    specials = [BOS, USER, ANSWER, END]
    tokens = specials + sorted(pre_tokenizers.ByteLevel.alphabet()) + [a + b for a, b in _MERGES]
    backend = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=_MERGES))
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\n+| ?[^\s]+|\s"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(specials)
    options = {"bos_token": BOS, "eos_token": END, "clean_up_tokenization_spaces": False}
    return PreTrainedTokenizerFast(tokenizer_object=backend, chat_template=chat_template, **options)


def save_target(target: Any, folder: Path, **options: Any) -> str:
    """A whole target as a folder that ``--target`` takes."""
    target.model.save_pretrained(folder, **options)
    target.tokenizer.save_pretrained(folder)
    return str(folder)


def chat(*turns: str) -> list[dict[str, str]]:
    """Turns of user and assistant in alternation."""
    return [{"role": ("user", "assistant")[i % 2], "content": turn} for i, turn in enumerate(turns)]


def write_jsonl(path: Path, rows: list[Any]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def change_json(file: Path, **fields: Any) -> None:
    """Other fields in a file of one JSON object."""
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))


def tiny_target(seed: int = 0, **changes: float):
    """A random Llama of 2 layers over the tiny tokenizer's vocabulary; the same weights every time."""
    tokenizer = tiny_tokenizer()
    sizes = {"vocab_size": len(tokenizer), "hidden_size": 16, "intermediate_size": 32, "max_position_embeddings": 128}
    layers = {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1}
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = LlamaForCausalLM(LlamaConfig(**{"eos_token_id": tokenizer.eos_token_id} | sizes | layers | changes))
    return wrap_model(model, tokenizer, name="tiny")


def encode_rows(rows: list[dict[str, Any]], tokenizer: Any = None, **settings: Any) -> list[EncodedRow]:
    """The encoded rows of a file with these rows."""
    encoder = RowEncoder(tokenizer or tiny_tokenizer(), "tiny", **settings)
    records = [RawRow(row, f"rows.jsonl, line {number}") for number, row in enumerate(rows, 1)]
    return [encoded for record in records for encoded in encoder.encode(record)]


def encode_conversation(tokenizer: Any, messages: list[dict[str, Any]], *, is_cut: bool = False) -> EncodedRow:
    """Token ids and loss mask of one conversation, or the ``problem``."""
    (row,) = encode_rows([{"messages": messages} | ({"finish_reason": "length"} if is_cut else {})], tokenizer)
    return row


def token_rows(rows: Iterable[tuple[Sequence[int], Sequence[bool]]]) -> TokenRows:
    """Rows in memory, from (token ids, loss mask) pairs."""
    import datasets

    columns = [EncodedRow(list(token_ids), list(loss_mask)).columns() for token_ids, loss_mask in rows]
    return TokenRows(datasets.Dataset.from_list(columns, features=row_features()))


@torch.no_grad()
def states_before_norm(target: Target, token_T: Tensor, layers: Sequence[int]) -> Tensor:
    """[T, L, D]: the inputs of these layers, then the output of the last layer before the final norm."""
    seen: list[Tensor] = []
    decoder = decoder_of(target.model)
    hook = decoder.norm.register_forward_pre_hook(lambda module, given: seen.append(given[0]))
    output = decoder(input_ids=token_T.long()[None], use_cache=False, output_hidden_states=True)
    hook.remove()
    return torch.stack([*(output.hidden_states[layer][0] for layer in layers), seen[0][0]], dim=1)
