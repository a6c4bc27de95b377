"""Learned heads as torch modules: steps of training-time test are steps of drafting, and reduced
vocabularies hold the most frequent tokens.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from foredraft.core.errors import ModelError
from foredraft.models.heads.config import Eagle3Config, MedusaConfig
from foredraft.models.heads.eagle3 import Eagle3
from foredraft.models.heads.medusa import Medusa
from foredraft.models.heads.reduced import most_frequent
from foredraft.models.rope import Rope
from foredraft.testing.models import tiny_config

EAGLE = Eagle3Config(
    hidden_size=16,
    intermediate_size=24,
    num_heads=4,
    num_kv_heads=2,
    head_dim=4,
    vocab_size=20,
    draft_vocab_size=8,
    max_position_embeddings=64,
    rms_norm_eps=1e-5,
    rope=Rope(10000.0),
    target_hidden_size=16,
)
IDS = torch.arange(1, 17, 2)


def make_head(**options) -> Eagle3:
    torch.manual_seed(3)
    head = Eagle3(replace(EAGLE, **options), IDS, torch.randn(20, 16))
    for parameter in head.parameters():
        parameter.data.add_(0.2 * torch.randn_like(parameter))
    return head.double()


@pytest.mark.parametrize(
    "options", [{}, {"norm_before_residual": True}, {"norm_output": True}], ids=str
)
def test_a_step_of_training_time_test_is_a_step_of_drafting(options):
    """Row t of step s computes what a draft computes after t true rows and s of its own."""
    head = make_head(**options)
    length, num_steps = 9, 3
    tokens = torch.randint(0, 20, (2, length + num_steps))
    fused = head.fuse(torch.randn(2, length, 48, dtype=torch.float64))
    steps, hidden, outs = [], fused, []
    for s in range(num_steps):
        embedded = head.embed(tokens[:, s : s + length])
        hidden = head(embedded, hidden, torch.arange(length) + s, steps=steps)
        outs.append(hidden)
    for t in range(length):
        rows = fused[:, : t + 1]
        for s in range(num_steps):
            embedded = head.embed(tokens[:, : t + 1 + s])
            drafted = head(embedded, rows, torch.arange(t + 1 + s))
            torch.testing.assert_close(drafted[:, -1], outs[s][:, t], rtol=1e-9, atol=1e-11)
            rows = torch.cat([rows, drafted[:, -1:]], dim=1)


def test_a_mask_keeps_packed_sequences_apart():
    head = make_head()
    tokens = torch.randint(0, 20, (1, 7))
    fused = head.fuse(torch.randn(1, 7, 48, dtype=torch.float64))
    positions = torch.tensor([[0, 1, 2, 0, 1, 2, 3]])
    of = torch.tensor([0, 0, 0, 1, 1, 1, 1])
    mask = ((of[:, None] == of) & torch.ones(7, 7, dtype=torch.bool).tril())[None, None]
    packed = head(head.embed(tokens), fused, positions, mask)
    for part in (slice(0, 3), slice(3, 7)):
        alone = head(head.embed(tokens[:, part]), fused[:, part], torch.arange(7)[: len(of[part])])
        torch.testing.assert_close(packed[:, part], alone)


def test_gradients_reach_every_parameter_of_an_eagle3_head_and_not_the_targets_embedding():
    head = make_head()
    steps: list = []
    hidden = head.fuse(torch.randn(1, 5, 48, dtype=torch.float64))
    for s in range(2):
        embedded = head.embed(torch.randint(0, 20, (1, 5)))
        hidden = head(embedded, hidden, torch.arange(5) + s, steps=steps)
    head.logits(hidden).logsumexp(-1).sum().backward()
    assert all(bool(each.grad.abs().sum() > 0) for each in head.parameters())
    assert "embed_tokens.weight" not in head.state_dict()


def test_medusa_begins_as_the_targets_head_and_its_blocks_learn():
    target = torch.randn(20, 16)
    for config in (
        MedusaConfig(16, 20, 3),
        MedusaConfig(16, 20, 3, shared_head=True),
        MedusaConfig(16, 20, 3, shared_head=True, own_head=False),
        MedusaConfig(16, 20, 3, draft_vocab_size=8, num_layers=2),
    ):
        ids = None if config.draft_vocab_size is None else IDS
        heads = Medusa(config, ids, target)
        hidden = torch.randn(2, 4, 16)
        rows = target if ids is None else target[ids]
        for logits in heads(hidden):
            torch.testing.assert_close(logits, hidden @ rows.T)
        sum(each.logsumexp(-1).sum() for each in heads(hidden)).backward()
        assert all(each.grad is not None for each in heads.parameters())


def test_the_most_frequent_tokens_are_drafted_ties_to_the_lowest_id():
    counts = torch.tensor([0, 5, 2, 2, 9, 0, 2])
    assert most_frequent(counts, 3).tolist() == [1, 2, 4]
    assert most_frequent(counts, 4, always=[5]).tolist() == [1, 2, 4, 5]
    assert most_frequent(counts, 7).tolist() == list(range(7))
    for size, always in ((0, []), (8, []), (1, [2, 3])):
        with pytest.raises(ModelError, match=f"a draft vocabulary of {size} tokens"):
            most_frequent(counts, size, always)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_heads": 3}, "3 attention heads cannot share 2"),
        ({"head_dim": 3}, "head_dim is 3"),
        ({"draft_vocab_size": 21}, "draft_vocab_size 21 is more than the vocab_size 20"),
        ({"target_hidden_size": 8}, "needs embed_tokens of its own"),
        ({"feature_layers": (1, 2)}, "2 feature layers given, expected 3"),
        ({"max_position_embeddings": 2**40}, "at most"),
    ],
    ids=str,
)
def test_sizes_that_cannot_belong_together_are_refused(options, message):
    with pytest.raises(ModelError, match=message):
        replace(EAGLE, **options)


def test_features_are_read_where_the_head_or_eagle_says():
    target = tiny_config(num_layers=30)
    assert EAGLE.layers_of(target) == (2, 15, 27)
    assert replace(EAGLE, feature_layers=(0, 1, 30)).layers_of(target) == (0, 1, 30)
    with pytest.raises(ModelError, match=r"feature layer 31 is outside the target's 0\.\.30"):
        replace(EAGLE, feature_layers=(0, 1, 31)).layers_of(target)
