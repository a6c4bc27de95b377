"""The one summary line that ends a generation, and the same figures for `--json`.

Knows metrics and words; knows nothing of how they were measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from foredraft.engine.outputs import RequestMetrics, RequestOutput


# Fewer tokens than this are decoded in a few tens of passes, and a ratio of such times is noise.
COMPARABLE_TOKENS = 48


@dataclass(frozen=True, slots=True)
class Comparison:
    """Speculation against plain decoding of one prompt; rates in tokens per second of decoding."""

    tokens_per_second: float
    plain_tokens_per_second: float
    num_tokens: int  # that a run decoded after the prompt's own pass
    identical: bool | None  # None: sampled without a seed, so two runs need not agree

    @property
    def speedup(self) -> float | None:
        """None where an answer was too short to measure."""
        if self.num_tokens < COMPARABLE_TOKENS or not self.plain_tokens_per_second:
            return None
        return self.tokens_per_second / self.plain_tokens_per_second


def summary_line(
    output: RequestOutput, comparison: Comparison | None = None, separator: str = " · "
) -> str:
    """Tokens, tokens/s, acceptance, and the speed against plain decoding where it was measured.

    Several completions count together; they share passes, so their speed is that of each.
    """
    metrics = [each.metrics for each in output.outputs if each.metrics is not None]
    rate = comparison.tokens_per_second if comparison else _rate(metrics)
    unit = "tokens/s" if len(output.outputs) == 1 else "tokens/s each"
    parts = [f"{sum(len(one.token_ids) for one in output.outputs)} tokens"]
    if len(output.outputs) > 1:
        parts.insert(0, f"{len(output.outputs)} completions")
    parts.append(f"{rate:.1f} {unit}" if rate else "too short to time")
    parts.extend(_acceptance(metrics))
    if comparison is not None:
        parts.append(_against_plain(comparison))
    return separator.join(parts)


def _rate(metrics: Sequence[RequestMetrics]) -> float:
    seconds = sum(each.decode_seconds for each in metrics)
    tokens = sum(each.num_generated_tokens - each.num_first_step_tokens for each in metrics)
    return tokens / seconds if seconds > 0 else 0.0


def _acceptance(metrics: Sequence[RequestMetrics]) -> list[str]:
    speculation = [each.speculative_decoding for each in metrics]
    drafted = sum(each.num_draft_tokens for each in speculation)
    if not drafted:
        return ["nothing drafted"]
    accepted = sum(each.num_accepted_draft_tokens for each in speculation)
    steps = sum(each.num_spec_steps for each in speculation)
    return [
        f"mean acceptance length {1 + accepted / steps:.2f}",
        f"acceptance rate {accepted / drafted:.0%}",
    ]


def _against_plain(comparison: Comparison) -> str:
    words = {
        True: "identical tokens",
        False: "DIFFERENT TOKENS",
        None: "tokens not compared (no seed)",
    }[comparison.identical]
    if comparison.speedup is None:
        short = f"{comparison.num_tokens} decoded, below {COMPARABLE_TOKENS}"
        return f"too short to compare the speed ({short}), {words}"
    plain = f"{comparison.plain_tokens_per_second:.1f} tokens/s"
    return f"{comparison.speedup:.2f}x plain decoding ({plain}), {words}"


def output_values(output: RequestOutput, comparison: Comparison | None = None) -> dict[str, Any]:
    """The JSON form of a finished request."""
    values: dict[str, Any] = {
        "prompt_token_ids": list(output.prompt_token_ids),
        "outputs": [
            {
                "index": each.index,
                "text": each.text,
                "token_ids": list(each.token_ids),
                "origins": [str(origin.value) for origin in each.origins],
                "finish_reason": each.finish_reason,
                "stop_reason": each.stop_reason,
                "logprobs": None
                if each.logprobs is None
                else [asdict(one) for one in each.logprobs],
                "error": each.error,
                "metrics": None if each.metrics is None else _metrics_values(each.metrics),
            }
            for each in output.outputs
        ],
    }
    if comparison is not None:
        values["comparison"] = {**asdict(comparison), "speedup": comparison.speedup}
    return values


def _metrics_values(metrics: RequestMetrics) -> dict[str, Any]:
    return {**asdict(metrics), "decode_tokens_per_second": metrics.decode_tokens_per_second}
