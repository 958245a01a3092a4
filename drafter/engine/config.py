"""Settings of one engine, and options of one request. No torch here."""

from dataclasses import dataclass

from drafter.proposers.options import SIZED_METHODS, DraftOptions
from drafter.utils.validate import check_ranges, within


@dataclass(frozen=True)
class RequestOptions:
    """Options of one request. No option changes a token (with ``verify="rejection"``: the distribution of the tokens).

    Attributes:
        speculate: False: no drafts, one token per target forward. A step of such requests only is plain decoding.
        num_logprobs: return the log-probabilities of the tokens and of so many most likely tokens at each position;
            None: return none.
        want_tree: return the draft tree of every step.
    """

    speculate: bool = True
    num_logprobs: int | None = within(None, low=0)
    want_tree: bool = False

    def __post_init__(self) -> None:
        check_ranges(self)


@dataclass(frozen=True)
class EngineConfig(DraftOptions):
    """Settings of an engine, in addition to :class:`DraftOptions`.

    Attributes:
        max_rows: B, rows that decode at the same time.
        max_length: most tokens of prompt and answer together; None: as many as the prompts of a call need.
        prefill_chunk: prompt tokens per forward.
        reuse_prefixes: copy the keys and values of a common prefix from another row of the cache.
        compile: compile the step (torch.compile); None: on CUDA only.
        exact_attention: attention in float64. The sums then round alike wherever a token is in the cache: also in
            bfloat16 the text equals, token for token, that of ``autoregressive`` in steps of as many nodes.
        tuned: file of measured sizes that `drafter tune` wrote for this method (redrafter or hybrid): W, L and N follow
            the number of running rows and the recent acceptance. None: the tree is the one that is set here.
        max_drafted_rows: a step of more running rows is plain decoding (draft-model has no such limit); None: no limit.
    """

    max_rows: int = within(8, low=1, high=1024)
    max_length: int | None = within(None, low=2)
    prefill_chunk: int = within(256, low=1)
    reuse_prefixes: bool = False
    compile: bool | None = None
    exact_attention: bool = False
    tuned: str | None = None
    max_drafted_rows: int | None = within(None, low=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.tuned is not None and (
            self.method not in SIZED_METHODS or self.tree_size is not None or self.tree_policy != "all-nodes"
        ):
            raise ValueError(
                f"--tuned sizes the trees of --method {' and '.join(SIZED_METHODS)}: leave it out with another method, "
                "--tree-size or --tree-policy"
            )
