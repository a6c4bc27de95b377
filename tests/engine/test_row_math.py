"""The compiled row mathematics in the engine: on the same logits every rule says what it says with
torch's (sglang#39253: a backend that fell back to the argmax), so that one law test is both's.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from foredraft import LLM, SamplingParams
from foredraft.kernels.catalog import native_available
from foredraft.testing.drafters import RepeatDrafter, SkewedDrafter, SkewedTreeDrafter, TreeDrafter
from foredraft.testing.models import tiny_model

if native_available():
    from foredraft.kernels.native import NativeKernels

pytestmark = pytest.mark.skipif(not native_available(), reason="built without a C++ compiler")

VOCAB = 33
PROMPTS = [[3 + i, 1, 4, 1, 5][: 1 + i % 5] for i in range(24)]
SAMPLING = [
    {"temperature": 0.0, "frequency_penalty": 0.7},
    {"temperature": 1.0},
    {"temperature": 0.8, "top_p": 0.9},
    {"temperature": 1.3, "top_k": 7, "presence_penalty": 1.0},
    {"temperature": 2.0, "min_p": 0.05, "logit_bias": {2: 3.0}},
    {"temperature": 1.0, "top_k": 2**70},
    {"temperature": 1.0, "top_k": 20, "top_p": 0.5, "min_p": 0.01, "banned_token_ids": [4]},
]


class Compiled:
    """The model's own kernels, but for the row mathematics."""

    def __init__(self, model):
        self._kernels, self.row_math = model.kernels, NativeKernels(2).row_math

    def __getattr__(self, name):
        return getattr(self._kernels, name)


class WithCompiled:
    def __init__(self, model):
        self._model, self.kernels = model, Compiled(model)

    def __getattr__(self, name):
        return getattr(self._model, name)


def skewed_law(context):
    weights = torch.arange(VOCAB, dtype=torch.float64).roll(int(context[-1]) + len(context))
    return weights / weights.sum()


DRAFTERS = {
    "one-hot tree": TreeDrafter(RepeatDrafter(2), RepeatDrafter(5)),
    "drawn tree": SkewedTreeDrafter(skewed_law, (-1, -1, 0, 0, 1)),
    "drawn chain": SkewedDrafter(skewed_law),
}


@pytest.mark.parametrize(
    ("rule", "drafter"),
    [
        (None, None),
        *((rule, name) for rule in ("standard", "coupled", "typical") for name in DRAFTERS),
        ("block", "drawn chain"),
        ("synthetic", "drawn tree"),
    ],
)
def test_every_rule_says_the_same_on_both(rule, drafter):
    loaded = tiny_model(seed=3, vocab_size=VOCAB, sharpness=1.0)
    config = {"num_speculative_tokens": 5, "rejection_sample_method": rule}
    if rule == "synthetic":
        config["synthetic_acceptance_length"] = 2.5
    params = [
        SamplingParams(max_tokens=12, ignore_eos=True, seed=i, **SAMPLING[i % len(SAMPLING)])
        for i in range(len(PROMPTS))
    ]
    said = []
    for model in (loaded.model, WithCompiled(loaded.model)):
        llm = LLM(
            replace(loaded, model=model),
            drafter=drafter and DRAFTERS[drafter],
            speculative_config=drafter and config,
            seed=11,
        )
        outputs = llm.generate(PROMPTS, params)
        said.append([(list(each.token_ids), list(each.origins)) for each in outputs])
    assert said[0] == said[1]
    assert len({tuple(tokens) for tokens, _ in said[1]}) == len(PROMPTS)
