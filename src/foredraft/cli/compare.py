"""Speculation beside plain decoding, on one prompt, in one process.

Knows two engines over one model; knows nothing of terminals.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from foredraft.cli.summary import Comparison

if TYPE_CHECKING:
    from foredraft import LLM
    from foredraft.core.sampling import SamplingParams
    from foredraft.engine.outputs import RequestOutput


def compare_with_plain(
    speculative: Callable[[], LLM],
    plain: LLM,
    prompt: Sequence[int],
    params: SamplingParams,
    first: Callable[[], RequestOutput],
) -> tuple[RequestOutput, Comparison]:
    """Run both twice: speculative, plain, plain, speculative, so that a machine's drift cancels.

    `first` is the first speculative run, which the caller may show as it goes. The other one has an
    engine of its own, made by `speculative`: a drafter that learns would know the answer already.
    Returns the first run's output.
    """
    runs = [(True, first())]
    runs += [(False, plain.generate([list(prompt)], params)[0]) for _ in range(2)]
    runs.append((True, speculative().generate([list(prompt)], params)[0]))
    comparable = params.temperature == 0 or params.seed is not None
    ids = [tuple(each.token_ids) for _, output in runs for each in output.outputs[:1]]
    return runs[0][1], Comparison(
        tokens_per_second=_rate([output for ours, output in runs if ours]),
        plain_tokens_per_second=_rate([output for ours, output in runs if not ours]),
        num_tokens=min(_decoded(output) for _, output in runs),
        identical=len(set(ids)) == 1 if comparable else None,
    )


def _decoded(output: RequestOutput) -> int:
    """Tokens after the prompt's own pass."""
    return output.metrics.num_generated_tokens - output.metrics.num_first_step_tokens


def _rate(outputs: Sequence[RequestOutput]) -> float:
    """Tokens decoded after the prompt's own pass, over their seconds, of all runs together."""
    seconds = sum(output.metrics.decode_seconds for output in outputs)
    return sum(map(_decoded, outputs)) / seconds if seconds > 0 else 0.0
