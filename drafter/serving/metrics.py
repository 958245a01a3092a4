"""Counters and histograms of a server, in the text format of Prometheus."""

from collections.abc import Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest

_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
_STEP_SECONDS = (0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1)
_TOKENS = (1, 2, 3, 4, 5, 6, 8, 12, 16)

OUTCOMES = ("completed", "refused", "unauthorized", "overloaded", "hung_up", "timed_out", "failed")


class Metrics:
    """Counters and histograms for ``/metrics``; thread-safe. Each server has a registry of its own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = self._counter("requests", "Requests for generation by outcome", "outcome")
        for outcome in OUTCOMES:
            self.requests.labels(outcome)
        self.answers = self._counter("answers", "Finished answers by finish reason", "finish_reason")
        self.queue_depth = self._gauge("queue_depth", "Answers that wait for a row")
        self.active_rows = self._gauge("active_rows", "Rows in use")
        self.prompt_tokens = self._counter("prompt_tokens", "Prompt tokens of answers that got a row")
        self.shared_tokens = self._counter("shared_prompt_tokens", "Prompt tokens that the prefix cache held")
        self.tokens = self._counter("generated_tokens", "Generated tokens")
        self.drafted_tokens = self._counter("accepted_draft_tokens", "Generated tokens that were drafted and accepted")
        self.target_forwards = self._counter("target_forwards", "Target forwards for tokens, summed over rows")
        self.steps = self._counter("steps", "Steps of the engine")
        self.failed_steps = self._counter("failed_steps", "Steps that raised", "cause")
        self.tokens_per_step = self._histogram("tokens_per_step", "Tokens of a row in one step", _TOKENS)
        self.step_seconds = self._histogram("step_seconds", "Time of a step", _STEP_SECONDS)
        self.first_token_seconds = self._histogram(
            "time_to_first_token_seconds", "From arrival to the first token", _SECONDS
        )
        self.token_seconds = self._histogram(
            "time_per_output_token_seconds",
            "Time of each token after the first, mean of an answer",
            _STEP_SECONDS,
        )
        self.answer_seconds = self._histogram("answer_seconds", "From arrival to the last token", _SECONDS)
        self.recorded_answers = self._counter("recorded_answers", "Answers written by --record")
        self.is_recording = self._gauge("is_recording", "1 while --record writes; 0 without it, or after a full disk")
        self.drafter_swaps = self._counter("drafter_swaps", "Drafters that took over from another")
        self._drafter = Gauge("drafter_info", "Digest of the drafter in use", ("digest",), registry=self.registry)
        ProcessCollector(registry=self.registry)

    def name_drafter(self, digest: str) -> None:
        """Set the digest of the drafter in use."""
        self._drafter.clear()
        self._drafter.labels(digest).set(1)

    def render(self) -> bytes:
        """The metrics in the text format of Prometheus."""
        return generate_latest(self.registry)

    def _counter(self, name: str, about: str, *labels: str) -> Counter:
        return Counter(f"drafter_{name}", about, labels, registry=self.registry)

    def _gauge(self, name: str, about: str) -> Gauge:
        return Gauge(f"drafter_{name}", about, registry=self.registry)

    def _histogram(self, name: str, about: str, buckets: Sequence[float]) -> Histogram:
        return Histogram(f"drafter_{name}", about, buckets=buckets, registry=self.registry)
