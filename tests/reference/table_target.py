"""TableTarget: a target that is a table of logits, so that the exact distribution of its answers can be written down.
It learns every token through the slots of the cache and the mask alone.
"""

import functools
import itertools
import math

import torch

from drafter.runtimes.base import Traits
from drafter.runtimes.torch.cache import CacheShape, LayerShape, SlotCache
from drafter.targets.slots import Slots, TargetOutput, slots_mask

MEMORY = 2  # generated tokens that the logits depend on


class TableTarget:
    """logits(answer so far) = table[code], code = sum of (token + 1) * (V + 1)^i over the answer's first two tokens.
    The hidden state is the row of logits and noise of no use. All prompts have `prompt_length` tokens.
    """

    name, revision, fingerprint, tokenizer = "table", None, "", None
    device, dtype, eos_token_ids, max_length = torch.device("cpu"), torch.float32, (), 64
    traits = Traits("float32")
    num_layers = 1
    cache_shape = CacheShape((LayerShape(num_heads=1, key_dim=1, value_dim=1),))  # the token and its position

    def __init__(self, vocab_size, prompt_length, *, seed=0, sharpness=1.5):
        generator = torch.Generator().manual_seed(seed)
        self.vocab_size = self.num_tokens = vocab_size
        self.prompt_length = prompt_length
        self.hidden_size = vocab_size + 4
        num_codes = (vocab_size + 1) ** MEMORY
        self.table = torch.randn(num_codes, self.hidden_size, generator=generator) * sharpness
        self.embedding_weight_VD = torch.randn(vocab_size, self.hidden_size, generator=generator)
        self.output_weight_VD = torch.eye(vocab_size, self.hidden_size)

    def embed(self, token):
        return self.embedding_weight_VD[token]

    @property
    def runtime(self):
        """The table runs itself."""
        return self

    def prepare_decoding(self):
        pass

    def cache_bytes(self, num_rows, num_slots):
        return self.cache_shape.num_bytes(num_rows, num_slots, self.dtype)

    def new_cache(self, num_rows, num_slots):
        return SlotCache(self.cache_shape, num_rows, num_slots, dtype=torch.int64, device=self.device)

    def forward(self, token_BT, slots=None, cache=None, context_layers=()):
        assert not context_layers
        if slots is None:
            place_BT = torch.arange(token_BT.shape[1]).expand_as(token_BT)
            slots, cache = Slots(place_BT, place_BT, None, 0, token_BT.shape[1]), self.new_cache(*token_BT.shape)
        cache.prepare(slots.slot_BT, first_row=slots.first_row, num_visible=slots.num_visible)
        stored = cache.update(token_BT[:, None, :, None], slots.position_BT[:, None, :, None], 0)
        token_BS, position_BS = (each[:, 0, :, 0] for each in stored)
        place_BS = position_BS - self.prompt_length  # 0 for the first generated token
        is_read_BS = (place_BS >= 0) & (place_BS < MEMORY)
        digit_BS = torch.where(is_read_BS, (token_BS + 1) * (self.vocab_size + 1) ** place_BS.clamp(0, MEMORY), 0)
        code_BT = (slots_mask(slots)[:, 0] * digit_BS[:, None]).sum(dim=2)
        # Nodes at equal places would add up to no code at all; only a wrong mask lets a node see two of them.
        hidden_BTD = self.table[code_BT.clamp_max(len(self.table) - 1)]
        return TargetOutput(hidden_BTD, hidden_BTD)

    def logits(self, hidden):
        return hidden @ self.output_weight_VD.T

    def logits_after(self, answer):
        """[V]: the logits after the first tokens of an answer."""
        code = sum((token + 1) * (self.vocab_size + 1) ** i for i, token in enumerate(answer[:MEMORY]))
        return self.table[code, : self.vocab_size]


def exact_distribution(step, vocab_size, num_tokens):
    """Probability of every answer of `num_tokens` tokens; step(answer so far) is the distribution of the next token."""
    step = functools.cache(step)
    return {
        answer: math.prod(step(answer[:i])[token] for i, token in enumerate(answer))
        for answer in itertools.product(range(vocab_size), repeat=num_tokens)
    }
