"""Settings of one engine, and options of one request. Imports no torch."""

from dataclasses import dataclass

from drafter.proposers.options import DraftOptions
from drafter.utils.validate import check_ranges, within


@dataclass(frozen=True)
class RequestOptions:
    """Options of one request. No option changes a token (with ``verify="rejection"``: no distribution of tokens).

    Attributes:
        speculate: False: no drafts, one token per target forward. A step of such requests alone is plain decoding.
        num_logprobs: return the log-probabilities of the tokens and of this number of likeliest tokens at each
            position; None: return none.
        want_tree: return the draft tree of every step.
    """

    speculate: bool = True
    num_logprobs: int | None = within(None, low=0, high=2**31)
    want_tree: bool = False

    def __post_init__(self) -> None:
        check_ranges(self)


@dataclass(frozen=True)
class EngineConfig(DraftOptions):
    """Settings of an engine, in addition to :class:`DraftOptions`.

    Attributes:
        max_num_seqs: B, largest number of rows that decode at the same time.
        max_model_len: largest number of tokens of a prompt and its answer together; None: the need of the prompts of a
            call.
        prefill_chunk: prompt tokens per forward.
        enable_prefix_caching: copy the keys and values of a common prefix from another row of the cache.
        compile: compile the step (torch.compile); None: on CUDA only.
        exact_attention: compute attention in float64. The sums then do not depend on the slots of tokens, so a text in
            bfloat16 also equals the text of ``none`` in steps of the same number of nodes, token for token.
        tuned: file of `drafter tune`. W, L and N then follow the number of running rows and the recent acceptance.
            None: the tree of these settings.
        max_drafted_rows: a step of more running rows is plain decoding, except for draft-model; None: no limit.
    """

    max_num_seqs: int = within(8, low=1, high=1024)
    max_model_len: int | None = within(None, low=2, high=2**24)
    prefill_chunk: int = within(256, low=1, high=2**24)
    enable_prefix_caching: bool = False
    compile: bool | None = None
    exact_attention: bool = False
    tuned: str | None = None
    max_drafted_rows: int | None = within(None, low=0, high=1024)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.tuned is not None and (
            self.method != "drafter" or self.tree_size is not None or self.tree_policy != "all-nodes"
        ):
            raise ValueError(
                "--tuned sizes the trees of --method drafter: leave it out with another method, "
                "--tree-size or --tree-policy"
            )
