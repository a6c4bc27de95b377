"""The one summary line that ends a generation, and the same figures for `--json`.

Knows metrics and words; knows nothing of how they were measured.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from foredraft.engine.outputs import RequestMetrics, RequestOutput


@dataclass(frozen=True, slots=True)
class Comparison:
    """Speculation against plain decoding of one prompt; rates in tokens per second of decoding."""

    tokens_per_second: float
    plain_tokens_per_second: float
    identical: bool | None  # None: sampled without a seed, so two runs need not agree

    @property
    def speedup(self) -> float | None:
        """None where an answer was too short to measure."""
        if not self.plain_tokens_per_second or not self.tokens_per_second:
            return None
        return self.tokens_per_second / self.plain_tokens_per_second


def summary_line(output: RequestOutput, comparison: Comparison | None = None) -> str:
    """Tokens, tokens/s, acceptance, and the speed against plain decoding where it was measured."""
    metrics = output.metrics
    rate = comparison.tokens_per_second if comparison else metrics.decode_tokens_per_second
    parts = [
        f"{len(output.token_ids)} tokens",
        f"{rate:.1f} tokens/s" if rate else "too short to time",
    ]
    parts.extend(_acceptance(metrics))
    if comparison is not None:
        parts.append(_against_plain(comparison))
    return " · ".join(parts)


def _acceptance(metrics: RequestMetrics) -> list[str]:
    speculation = metrics.speculative_decoding
    if not speculation.num_draft_tokens:
        return ["nothing drafted"]
    return [
        f"mean acceptance length {speculation.mean_acceptance_length:.2f}",
        f"acceptance rate {speculation.draft_acceptance_rate:.0%}",
    ]


def _against_plain(comparison: Comparison) -> str:
    words = {
        True: "identical tokens",
        False: "DIFFERENT TOKENS",
        None: "tokens not compared (no seed)",
    }[comparison.identical]
    if comparison.speedup is None:
        return f"too short to compare the speed, {words}"
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
