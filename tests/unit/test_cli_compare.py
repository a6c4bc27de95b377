"""Speculative and plain runs side by side: each speculative one on an engine that knows nothing."""

from __future__ import annotations

from foredraft import LLM, SamplingParams
from foredraft.cli.compare import compare_with_plain
from foredraft.testing.models import tiny_model

TARGET = tiny_model(seed=2)
CONFIG = {"method": "suffix"}  # remembers what was answered


def test_the_second_turn_knows_no_more_than_the_first() -> None:
    prompt, params = [3, 5, 7, 9], SamplingParams(max_tokens=24, temperature=0.0)
    made: list[LLM] = []

    def speculative() -> LLM:
        made.append(LLM(TARGET, speculative_config=CONFIG))
        return made[-1]

    first = speculative()
    plain = LLM(TARGET, speculative_config=None)
    output, comparison = compare_with_plain(
        speculative, plain, prompt, params, lambda: first.generate([prompt], params)[0]
    )
    assert comparison.identical
    assert len(made) == 2
    again = LLM(TARGET, speculative_config=CONFIG).generate([prompt], params)[0]
    assert output.metrics.num_steps == again.metrics.num_steps
    assert first.generate([prompt], params)[0].metrics.num_steps < again.metrics.num_steps
