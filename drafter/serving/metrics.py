"""Counters and histograms of a server, in the text format of Prometheus."""

from functools import partial

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Info, ProcessCollector

_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
_STEP_SECONDS = (0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1)
_TOKENS = (1, 2, 3, 4, 5, 6, 8, 12, 16)

OUTCOMES = ("completed", "refused", "unauthorized", "overloaded", "hung_up", "timed_out", "failed")


class Metrics:
    """Counters and histograms for ``/metrics``; thread-safe. Each server has a registry of its own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        counter = partial(Counter, namespace="drafter", registry=self.registry)
        gauge = partial(Gauge, namespace="drafter", registry=self.registry)
        histogram = partial(Histogram, namespace="drafter", registry=self.registry)
        self.requests = counter("requests", "Requests for generation by outcome", ["outcome"])
        for outcome in OUTCOMES:
            self.requests.labels(outcome)
        self.answers = counter("answers", "Finished answers by finish reason", ["finish_reason"])
        self.queue_depth = gauge("queue_depth", "Answers that wait for a row")
        self.active_rows = gauge("active_rows", "Rows in use")
        self.prompt_tokens = counter("prompt_tokens", "Prompt tokens of answers that got a row")
        self.shared_tokens = counter("shared_prompt_tokens", "Prompt tokens that the prefix cache held")
        self.tokens = counter("generated_tokens", "Generated tokens")
        self.drafted_tokens = counter("accepted_draft_tokens", "Generated tokens that were drafted and accepted")
        self.target_forwards = counter("target_forwards", "Target forwards for tokens, summed over rows")
        self.failed_steps = counter("failed_steps", "Steps that raised", ["cause"])
        self.failed_drafts = counter("failed_drafts", "Steps that went on without drafts, because the drafts failed")
        self.tokens_per_step = histogram("tokens_per_step", "Tokens of a row in one step", buckets=_TOKENS)
        self.step_seconds = histogram("step_seconds", "Time of a step", buckets=_STEP_SECONDS)
        self.first_token_seconds = histogram("time_to_first_token_seconds", "Time to first token", buckets=_SECONDS)
        mean = "Time of each token after the first, mean of an answer"
        self.token_seconds = histogram("time_per_output_token_seconds", mean, buckets=_STEP_SECONDS)
        self.answer_seconds = histogram("answer_seconds", "From arrival to the last token", buckets=_SECONDS)
        self.recorded_answers = counter("recorded_answers", "Answers written by --record")
        self.unrecorded_answers = counter("unrecorded_answers", "Answers that --record left out")
        self.is_recording = gauge("is_recording", "1 while --record writes; 0 without it, or after a full disk")
        self.drafter_swaps = counter("drafter_swaps", "Drafters that took over from another")
        self.drafter = Info("drafter", "Digest of the drafter in use", registry=self.registry)
        ProcessCollector(registry=self.registry)
