"""Rows of logits that give no token: an error for their own request alone, as plain decoding has
it.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from foredraft import LLM
from foredraft.kernels.catalog import native_available
from foredraft.testing.drafters import RepeatDrafter
from foredraft.testing.models import tiny_model

from .conftest import GREEDY, PROMPTS

KERNELS = ["reference", *(["native"] if native_available() else [])]
SAID = 5  # the best id of every row


class Peaked:
    """A model that always says `SAID`: its rows are `SAID`'s one-hot times `peak`, and NaN where
    they follow `last` equal tokens.
    """

    def __init__(self, model, peak, last=None):
        self.config, self.kernels = model.config, model.kernels
        self._run, self._peak, self._last = model.run, peak, last

    def run(self, batch, cache):
        output = self._run(batch, cache)
        logits = torch.zeros_like(output.logits)
        logits[:, SAID] = self._peak
        if self._last is not None:
            for i, row in enumerate(batch.logit_rows):
                if self._positions(batch)[row] >= self._last:
                    logits[i, SAID] = torch.nan
        return replace(output, logits=logits)

    def _positions(self, batch):
        return [segment.prefix + i for segment in batch.segments for i in range(segment.rows)]


def llm_of(kernels, rule, drafter, **peaked):
    loaded = tiny_model(seed=1, kernels=kernels, dtype="float32")
    loaded = replace(loaded, model=Peaked(loaded.model, **peaked))
    config = {"num_speculative_tokens": 4, "rejection_sample_method": rule}
    if rule == "synthetic":
        config["synthetic_acceptance_length"] = 3.0
    return LLM(loaded, drafter=drafter, speculative_config=drafter and config, page_size=4)


@pytest.mark.parametrize("temperature", [0.0, 0.5])
@pytest.mark.parametrize("kernels", KERNELS)
def test_an_error_inside_a_window_counts_the_tokens_before_it(kernels, temperature):
    """The seventh output token cannot be had: the error says so, wherever its row was."""
    params = replace(GREEDY, temperature=temperature, seed=3)
    last = len(PROMPTS[0]) + 5
    found = []
    for drafter in (None, RepeatDrafter(SAID), RepeatDrafter(SAID + 1)):
        llm = llm_of(kernels, None, drafter, peak=50.0, last=last)
        output = llm.generate([PROMPTS[0]], params)[0]
        found.append((list(output.token_ids), output.outputs[0].error))
    assert found == [found[0]] * 3
    assert found[0][0] == [SAID] * 6
    assert "at output token 7: logits must be finite" in found[0][1]


@pytest.mark.parametrize("rule", [None, "coupled", "standard", "block", "typical", "synthetic"])
@pytest.mark.parametrize("kernels", KERNELS)
def test_a_temperature_that_takes_logits_out_of_range_ends_its_request_alone(kernels, rule):
    llm = llm_of(kernels, rule, rule and RepeatDrafter(SAID), peak=1e35)
    hot, cold = replace(GREEDY, temperature=1.0), replace(GREEDY, temperature=1e-5)
    outputs = llm.generate(PROMPTS[:3], [hot, cold, hot])
    assert [list(outputs[i].token_ids) for i in (0, 2)] == [[SAID] * 24] * 2
    assert outputs[1].finish_reason == "error"
    assert "is 1e+35 at output token " in outputs[1].outputs[0].error
    assert "divided by temperature 1e-05 it leaves float32" in outputs[1].outputs[0].error
