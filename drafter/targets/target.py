"""The target: a language model whose text is never changed, and the runtime that computes its forward.

Shapes: B rows · T tokens of a forward · V vocabulary · D hidden size · C context size (D, or D times the number of
selected layers).
"""

from collections.abc import Mapping, Sequence
from functools import cached_property
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from torch import Tensor

from drafter.targets.chat import Chat, Fork, encode, is_longer, texts_of, what_runs
from drafter.targets.slots import Slots, TargetOutput

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MAX_POSITIONS = 2**31 - 1  # of a target that states no number, or a larger one


class Target:
    """A frozen decoder-only causal language model with plain key/value attention, made by
    :func:`drafter.runtimes.loading.load_target` and :func:`drafter.runtimes.loading.wrap_model`.

    ``name`` is what the user called it, ``fingerprint`` a sample of the weights (:mod:`drafter.targets.fingerprint`)
    with the scheme of their rounding, ``quantization`` (or ``none``), ``max_length`` the context in tokens;
    ``eos_token_ids`` end an answer.
    """

    def __init__(
        self,
        runtime: Any,
        tokenizer: "PreTrainedTokenizerBase | None",
        config: Any,
        *,
        name: str,
        fingerprint: str,
        generation_config: Any = None,
        revision: str | None = None,
        quantization: str = "none",
    ) -> None:
        self.runtime, self.tokenizer, self.config = runtime, tokenizer, config
        self.name, self.revision, self.quantization = name, revision, quantization
        text = config.get_text_config(decoder=True)
        self.num_layers = int(text.num_hidden_layers)
        positions = int(getattr(text, "max_position_embeddings", 0) or 0)
        self.max_length = min(positions, MAX_POSITIONS) if positions > 0 else MAX_POSITIONS
        self.eos_token_ids = _eos_token_ids(generation_config, config, tokenizer)
        self.fingerprint = fingerprint if quantization == "none" else f"{fingerprint}-{quantization}"

    model = property(attrgetter("runtime.model"), doc="The module of transformers, of a target that runs in torch.")
    traits = property(attrgetter("runtime.traits"), doc="Facts about the runtime (drafter.runtimes.base.Traits).")
    device = property(attrgetter("runtime.device"), doc="Device of the input embeddings, where token ids go.")
    dtype = property(attrgetter("runtime.dtype"), doc="Floating point type of embeddings and hidden states.")
    vocab_size = property(attrgetter("runtime.vocab_size"), doc="V, rows of the output matrix.")
    hidden_size = property(attrgetter("runtime.hidden_size"), doc="D, columns of the output matrix.")

    @cached_property
    def num_tokens(self) -> int:
        """Ids below are tokens of the tokenizer; from here to ``vocab_size`` they only pad the output matrix."""
        tokens = self.tokenizer.get_vocab().values() if self.tokenizer is not None else ()
        return min(max(tokens, default=self.vocab_size - 1) + 1, self.vocab_size)

    def forward(
        self, token_BT: Tensor, slots: Slots | None = None, cache: Any = None, context_layers: Sequence[int] = ()
    ) -> TargetOutput:
        """Run the decoder without its output matrix (:meth:`drafter.runtimes.base.Runtime.forward`)."""
        assert (slots is None) == (cache is None), "slots are those of a cache"
        return self.runtime.forward(token_BT, slots, cache, context_layers)

    def logits(self, hidden: Tensor) -> Tensor:
        """Output logits [..., V] of final hidden states [..., D], with the model's own scaling or soft cap."""
        return self.runtime.logits(hidden)

    def encode(self, text: str) -> list[int]:
        """Token ids of raw text, with the special tokens the tokenizer adds by itself."""
        self._tokenizer()
        return list(self.encoder.map([[text, [], False, None]])[0])

    def encode_chat(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = ()) -> list[int]:
        """Token ids of a conversation up to the opening of the assistant's turn (:meth:`encode_chats`)."""
        return self.encode_chats([Chat(messages, tools)])[0]

    def encode_chats(self, chats: Sequence[Chat]) -> list[list[int]]:
        """Token ids of conversations up to the opening of the assistant's turn, by the tokenizer's own template, a
        stranger's program with limits of time and memory (ValueError: no template, a refusal, or a limit).
        """
        self._tokenizer()
        return self.encoder.map([[list(chat.messages), list(chat.tools), False, None] for chat in chats])

    @cached_property
    def encoder(self) -> Fork:
        return self.new_encoder()

    def new_encoder(self) -> Fork:
        """Encodes [text, messages or pieces; tools; special tokens are escaped; most tokens]; None: more tokens."""
        tokenizer, name = self.tokenizer, self.name

        def encoded(item: Any) -> list[int] | None:
            asked, tools, is_escaped, most = item
            if isinstance(asked, list) and isinstance(asked[0], dict):
                asked = Chat(asked, tools)
            if most is not None and is_longer(tokenizer, texts_of(asked), most):
                return None
            return encode(tokenizer, asked, name, escape_special_tokens=is_escaped)

        return Fork(encoded, f"{what_runs(name)}, or the tokenizer,")

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return str(self._tokenizer().decode(list(token_ids), skip_special_tokens=skip_special_tokens))

    def _tokenizer(self) -> Any:
        if self.tokenizer is None:
            raise ValueError(f"target {self.name!r} has no tokenizer: give token ids")
        return self.tokenizer


def _eos_token_ids(*owners: Any) -> tuple[int, ...]:
    for owner in owners:
        found = getattr(owner, "eos_token_id", None)
        if found is not None:
            return (int(found),) if isinstance(found, int) else tuple(int(token) for token in found)
    return ()
