"""Heads over kernels compute what their modules in torch do, whichever kernels those are."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from foredraft.cache.tensors import KVCache
from foredraft.core.errors import ModelError
from foredraft.kernels.catalog import native_available
from foredraft.kernels.interface import Segment
from foredraft.models.heads.config import MedusaConfig
from foredraft.models.heads.eagle3 import Eagle3
from foredraft.models.heads.eagle3_kernels import KernelEagle3
from foredraft.models.heads.medusa import Medusa
from foredraft.models.heads.medusa_kernels import KernelMedusa
from foredraft.testing.models import tiny_model

from .test_heads import EAGLE, IDS

KERNELS = [("reference", "float64", 1e-6), ("reference", "float32", 1e-4)]
if native_available():
    KERNELS += [("native", "float32", 1e-4), ("native", "bfloat16", 3e-2)]
OPTIONS = [
    {},
    {"norm_before_residual": True},
    {"norm_output": True},
    {"own_embedding": True, "target_hidden_size": 24},
]


def target_of(kernels, dtype, hidden_size=16):
    sizes = {"vocab_size": 20, "hidden_size": hidden_size, "head_dim": 8}
    return tiny_model(seed=2, kernels=kernels, dtype=dtype, **sizes)


def scattered(logits, ids):
    whole = torch.full((len(logits), 20), -torch.inf, dtype=logits.dtype)
    whole[:, ids] = logits
    return whole


@pytest.mark.parametrize(("kernels", "dtype", "tolerance"), KERNELS)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_an_eagle3_head_in_chunks_and_in_a_tree(kernels, dtype, tolerance, options):
    target = target_of(kernels, dtype, options.get("target_hidden_size", 16))
    torch.manual_seed(4)
    embedding = None if "own_embedding" in options else target.model.embed(list(range(20)))
    head = Eagle3(replace(EAGLE, head_dim=8, **options), IDS, embedding).to(target.dtype)
    ours = KernelEagle3(head, target)
    wide = head.double()
    assert ours.weight_bytes == sum(
        each.numel() * target.dtype.itemsize for each in head.parameters() if each.dim() == 2
    )
    tokens = torch.randint(0, 20, (7,)).tolist()
    features = torch.randn(7, 3 * target.config.hidden_size).to(target.model.embed([0]).dtype)
    fused = ours.fuse(features)
    cache = KVCache(ours.cache_shape, 3, 4, "cpu")
    pages = [2, 0, 1]
    outs = []
    for first, last in ((0, 3), (3, 7)):
        segment = Segment(first, last - first, (), pages)
        outs.append(ours.run(tokens[first:last], fused[first:last], [segment], cache))
    out = torch.cat(outs)
    embedded = wide.embed(torch.tensor([tokens])).double()
    want = wide(embedded, wide.fuse(features.double())[None], torch.arange(7))
    limits = {"rtol": tolerance, "atol": tolerance}
    torch.testing.assert_close(out.double(), want[0], **limits)
    torch.testing.assert_close(
        ours.logits(out[-2:]).double(), scattered(wide.logits(want)[0, -2:], IDS), **limits
    )
    # Two children of the last row, and one below the second: each sees its own ancestors.
    read, hidden = [tokens[6], 3, 5, 7], torch.stack([fused[6], out[6], out[6], out[5]])
    tree = ours.run(read, hidden, [Segment(6, 1, (-1, -1, 1), pages)], cache)
    for path in ([1], [2], [2, 3]):
        rows = torch.cat([fused[:7], hidden[path]])[None].double()
        text = [*tokens, *(read[i] for i in path)]
        alone = wide(wide.embed(torch.tensor([text])).double(), rows, torch.arange(len(text)))
        torch.testing.assert_close(tree[path[-1]].double(), alone[0, -1], **limits)


@pytest.mark.skipif(not native_available(), reason="the extension is not built")
def test_attention_heads_that_the_kernels_do_not_serve_are_refused():
    target = target_of("native", "float32")
    head = Eagle3(EAGLE, IDS, target.model.embed(list(range(20))))
    with pytest.raises(ModelError, match=r"head size that is a multiple of 8 .* model's is 4"):
        KernelEagle3(head, target)


@pytest.mark.parametrize(("kernels", "dtype", "tolerance"), KERNELS)
@pytest.mark.parametrize(
    "config",
    [
        MedusaConfig(16, 20, 2),
        MedusaConfig(16, 20, 2, num_layers=2, bias=False, shared_head=True),
        MedusaConfig(16, 20, 2, draft_vocab_size=8, shared_head=True, own_head=False),
    ],
    ids=["own heads", "one head", "the target's head"],
)
def test_medusa_heads(kernels, dtype, tolerance, config):
    target = target_of(kernels, dtype)
    ids = None if config.draft_vocab_size is None else IDS
    rows = target.model.head_rows(torch.arange(20))
    heads = Medusa(config, ids, rows)
    torch.manual_seed(6)
    for each in heads.blocks.parameters():
        each.data.normal_(std=0.3)
    heads = heads.to(target.dtype)
    ours = KernelMedusa(heads, target)
    x = torch.randn(5, 16).to(rows.dtype)
    for i, want in enumerate(heads.double()(x.double())):
        found = ours.logits(i, x).double()
        want = want if ids is None else scattered(want, IDS)
        torch.testing.assert_close(found, want, rtol=tolerance, atol=tolerance)
