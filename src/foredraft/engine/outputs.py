"""What a caller gets back: plain values, built once, holding nothing of the engine.

Knows tokens, text and counts; knows neither models nor pages.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from foredraft.core.acceptance import Origin
from foredraft.core.counts import AcceptanceCounts

FinishReason = Literal["stop", "length", "abort", "error"]


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities under the raw target (before any processor) at one position."""

    token_id: int
    logprob: float
    rank: int  # 1 = the most likely id
    # The most likely ids, best first; the chosen one is among them only if it ranks so.
    top: Mapping[int, float]


@dataclass(frozen=True, slots=True)
class SpeculativeDecodingMetrics:
    """Acceptance statistics of one request; field names are those of vLLM's response block."""

    # Tokens emitted per step that verified a draft; includes the extra token.
    mean_acceptance_length: float
    draft_acceptance_rate: float  # accepted / drafted; 0 without drafts
    acceptance_histogram: tuple[int, ...]  # steps that accepted exactly j draft tokens
    num_spec_steps: int  # steps that verified at least one draft token
    num_accepted_draft_tokens: int
    num_draft_tokens: int
    num_spec_tokens: int  # the configured number of draft tokens a step
    # P(the first i drafts accepted), over steps that drafted that far.
    acceptance_by_position: tuple[float, ...]
    # The rule asked for (typical, synthetic) changes what the target says; False: it is exact.
    lossy: bool

    @classmethod
    def from_counts(
        cls, counts: AcceptanceCounts, num_spec_tokens: int, *, lossy: bool
    ) -> SpeculativeDecodingMetrics:
        return cls(
            mean_acceptance_length=counts.mean_acceptance_length,
            draft_acceptance_rate=counts.acceptance_rate,
            acceptance_histogram=tuple(counts.histogram),
            num_spec_steps=counts.num_drafts,
            num_accepted_draft_tokens=counts.num_accepted_tokens,
            num_draft_tokens=counts.num_draft_tokens,
            num_spec_tokens=num_spec_tokens,
            acceptance_by_position=tuple(counts.acceptance_by_position),
            lossy=lossy,
        )


@dataclass(frozen=True, slots=True)
class RequestMetrics:
    """What one request cost. Seconds are wall clock; requests that share steps share them."""

    speculative_decoding: SpeculativeDecodingMetrics
    num_steps: int  # passes of the target after the one that emitted the first token
    num_generated_tokens: int
    num_first_step_tokens: int  # tokens emitted by the pass that finished the prompt
    prefill_seconds: float  # admission to the first committed token
    decode_seconds: float  # from there to the last committed token

    @property
    def decode_tokens_per_second(self) -> float:
        """Tokens emitted after the first pass, over the seconds they took; 0 if there were none."""
        decoded = self.num_generated_tokens - self.num_first_step_tokens
        return decoded / self.decode_seconds if self.decode_seconds > 0 else 0.0


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One generated sequence of a request."""

    index: int
    text: str
    token_ids: Sequence[int]
    origins: Sequence[Origin]  # where each token came from
    finish_reason: FinishReason
    stop_reason: str | int | None = None  # the stop string or stop id that ended it; None for EOS
    logprobs: Sequence[TokenLogprobs] | None = None
    error: str | None = None  # with finish_reason "error"
    metrics: RequestMetrics | None = None


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """A finished request: its prompt and `n` completions."""

    request_id: str
    prompt: str | None
    prompt_token_ids: Sequence[int]
    outputs: Sequence[CompletionOutput]
    prompt_logprobs: Sequence[TokenLogprobs | None] | None = None
    num_cached_tokens: int = 0  # of the prompt, found computed when its first completion began

    @property
    def text(self) -> str:
        return self.outputs[0].text

    @property
    def token_ids(self) -> Sequence[int]:
        return self.outputs[0].token_ids

    @property
    def origins(self) -> Sequence[Origin]:
        return self.outputs[0].origins

    @property
    def finish_reason(self) -> FinishReason:
        return self.outputs[0].finish_reason

    @property
    def logprobs(self) -> Sequence[TokenLogprobs] | None:
        return self.outputs[0].logprobs

    @property
    def metrics(self) -> RequestMetrics:
        """Metrics of the first completion (each completion carries its own)."""
        metrics = self.outputs[0].metrics
        assert metrics is not None  # every output the engine builds has them
        return metrics


@dataclass(frozen=True, slots=True)
class StreamDelta:
    """What was added to a streamed request since the delta before. `text` may lag behind
    `token_ids` (UTF-8, stop strings).
    """

    text: str
    token_ids: Sequence[int]
    origins: Sequence[Origin] = field(default=())
    finished: RequestOutput | None = None  # with the last delta
    index: int = 0  # of the completion
    emitted_at: float = 0.0  # `time.perf_counter` when the last of the tokens was committed
    completion: CompletionOutput | None = None  # with the last delta of a completion
    logprobs: Sequence[TokenLogprobs] = ()  # one for each of the tokens, where they were asked for
