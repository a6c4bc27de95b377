"""Weights of 8 bits: how near they are, what comes back as it was, and where they are asked for."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from foredraft import LLM, SamplingParams
from foredraft.core.errors import ConfigError
from foredraft.drafters.draft_model import DraftModelDrafter
from foredraft.drafters.eagle import EagleDrafter
from foredraft.drafters.medusa import MedusaDrafter
from foredraft.kernels.quantized import EightBitWeight, quantized
from foredraft.models.heads.config import MedusaConfig
from foredraft.models.heads.eagle3 import Eagle3
from foredraft.models.heads.medusa import Medusa
from foredraft.models.load import load_model
from foredraft.testing.models import tiny_model, write_tiny_checkpoint

from .test_heads import EAGLE, IDS

GREEDY = SamplingParams(temperature=0.0, max_tokens=16)


def random(n, k, seed=0):
    return torch.randn(n, k, generator=torch.Generator().manual_seed(seed))


@given(n=st.integers(1, 9), k=st.integers(1, 100), size=st.sampled_from([1e-3, 1.0, 300.0]))
def test_it_is_within_half_a_step(n, k, size):
    weight = random(n, k) * size
    found = quantized(weight)
    assert found.shape == (n, k)
    assert found.scales.shape == (n, -(-k // 32))
    step = found.scales.repeat_interleave(32, dim=1)[:, :k]
    assert bool(((found.widened(torch.float32) - weight).abs() <= step * (0.5 + 1e-4)).all())


def test_what_was_in_8_bits_comes_back_as_it_was():
    generator = torch.Generator().manual_seed(1)
    values = torch.randint(-127, 128, (5, 70), dtype=torch.int8, generator=generator)
    values[:, ::32] = 127  # the largest of its 32, as Q8_0 has one
    scales = torch.rand(5, 3, generator=generator).half().float()
    again = quantized(EightBitWeight(values, scales).widened(torch.float32))
    assert torch.equal(again.values, values)
    assert torch.equal(again.scales, scales)


def test_numbers_that_8_bits_cannot_say():
    assert not bool(quantized(torch.zeros(2, 40)).values.any())
    for wrong in (torch.inf, torch.nan):
        with pytest.raises(ValueError, match="isn't finite"):
            quantized(torch.tensor([[1.0, wrong]]))


def test_a_model_in_8_bits_is_that_of_its_widened_weights(tmp_path):
    """On both kernels; embedding and linears are 8 bits, norms as they are."""
    write_tiny_checkpoint(tmp_path / "model", seed=4, vocab_size=32)
    prompt = [1, 5, 9, 2]
    said, sizes = [], []
    for kernels in ("reference", "native"):
        loaded = load_model(
            tmp_path / "model", kernels=kernels, dtype="float32", quantization="q8_0"
        )
        sizes.append(loaded.weight_bytes)
        llm = LLM(loaded)
        said.append(llm.generate([prompt], GREEDY)[0].token_ids)
    whole = load_model(tmp_path / "model", dtype="float32")
    assert said[0] == said[1]
    assert sizes[0] == sizes[1] < 0.4 * whole.weight_bytes


def test_heads_and_draft_models_are_kept_in_8_bits(tmp_path):
    write_tiny_checkpoint(tmp_path / "model", seed=4, vocab_size=20)
    target = tiny_model(seed=2, vocab_size=20, hidden_size=16, head_dim=8)
    head = Eagle3(replace(EAGLE, head_dim=8), IDS, target.model.embed(list(range(20))))
    medusa = Medusa(MedusaConfig(num_heads=2, num_layers=1, hidden_size=16, vocab_size=20))
    for make in (
        lambda **options: EagleDrafter(target, head, **options),
        lambda **options: MedusaDrafter(medusa, target, **options),
        lambda **options: DraftModelDrafter(tmp_path / "model", target, **options),
    ):
        plain, small = make(), make(quantization="q8_0")
        assert small.capabilities.weight_bytes < plain.capabilities.weight_bytes
        with pytest.raises(ConfigError, match="quantization must be null or q8_0, got 'q4_0'"):
            make(quantization="q4_0")
