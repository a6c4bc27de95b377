"""A pass that goes on from hidden states: the bits of the whole pass, whatever is covered."""

from __future__ import annotations

import itertools

import pytest
import torch

from foredraft.kernels.interface import Segment
from foredraft.models.decoder import new_cache
from foredraft.models.first_layers import FirstLayers
from foredraft.models.interface import FlatBatch, LayerResume
from foredraft.testing.models import tiny_model

PAGES = 12
CONTEXT = 5  # positions of every request that are in the cache before


@pytest.fixture(scope="module", params=["native", "reference"])
def loaded(request):
    dtype = {"native": "bfloat16", "reference": "float64"}[request.param]
    return tiny_model(seed=2, kernels=request.param, dtype=dtype, vocab_size=32, num_layers=4)


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)


def filled_cache(loaded):
    """Three requests of CONTEXT positions, four pages of four each."""
    cache = new_cache(loaded.config, PAGES, 4, loaded.cache_dtype, loaded.device)
    segments = [Segment(0, CONTEXT, (), pages_of(i)) for i in range(3)]
    loaded.model.run(FlatBatch([(7 * i + 3) % 32 for i in range(3 * CONTEXT)], segments), cache)
    return cache


def pages_of(request):
    return list(range(4 * request, 4 * request + 4))


SEGMENTS = [
    Segment(CONTEXT, 1, (-1, 0, 1), pages_of(0)),  # a chain
    Segment(CONTEXT, 4, (), pages_of(1)),  # a part of a prompt
    Segment(CONTEXT, 2, (-1, -1, 0, 2), pages_of(2)),  # the end of one, and a tree
]
IDS = [(5 * i + 1) % 32 for i in range(sum(segment.rows for segment in SEGMENTS))]
STARTS = list(itertools.accumulate((segment.rows for segment in SEGMENTS), initial=0))


def covering(loaded, cache, layer, counts):
    """What a drafter does: the first rows of some segments, one by one, in the same cache."""
    first = FirstLayers(loaded.model, layer)
    resumes = {}
    for index, count in counts.items():
        segment, ids = SEGMENTS[index], IDS[STARTS[index] :]
        if count > segment.chain and index == 2:  # all of a tree at once
            hidden = first.hidden(FlatBatch(ids[: segment.rows], [segment]), cache)
        else:
            rows = [
                first.hidden(
                    FlatBatch([ids[i]], [Segment(segment.prefix + i, 1, (), segment.pages)]), cache
                )
                for i in range(count)
            ]
            hidden = torch.cat(rows)
        resumes[index] = LayerResume(layer, hidden)
    return resumes


@pytest.mark.parametrize("layer", [1, 2, 3])
@pytest.mark.parametrize("asked", [None, (0, 3, 5, 7, 12)], ids=["all", "some"])
@pytest.mark.parametrize(
    "counts",
    [{0: 4}, {0: 3}, {0: 1}, {0: 3, 1: 2}, {1: 4, 2: 1}, {0: 4, 1: 4, 2: 6}, {2: 6}],
    ids=str,
)
def test_it_is_the_whole_pass(loaded, layer, asked, counts):
    want_cache, cache = filled_cache(loaded), filled_cache(loaded)
    want = loaded.model.run(FlatBatch(IDS, SEGMENTS, asked), want_cache)
    resumes = covering(loaded, cache, layer, counts)
    got = loaded.model.run(FlatBatch(IDS, SEGMENTS, asked, resumes), cache)
    compare = torch.equal if loaded.model.kernels.name == "native" else torch.allclose
    assert compare(got.logits, want.logits)
    assert compare(got.hidden, want.hidden)
    assert compare(cache.keys, want_cache.keys)
    assert compare(cache.values, want_cache.values)


def test_the_first_layers_are_a_model_of_their_own(loaded):
    cache, whole = filled_cache(loaded), filled_cache(loaded)
    first = FirstLayers(loaded.model, 2)
    assert first.config.num_layers == 2
    batch = FlatBatch(IDS, SEGMENTS, [1, 4])
    logits, hidden = first.run_with_hidden(batch, cache)
    assert (logits.shape[0], hidden.shape[0]) == (2, len(IDS))
    assert torch.equal(logits, first.run(batch, cache).logits)
    # Above its layers nothing is written.
    assert torch.equal(cache.keys[2:], whole.keys[2:])
    assert not torch.equal(cache.keys[:2], whole.keys[:2])


@pytest.mark.parametrize("num_layers", [0, 4, -1])
def test_there_must_be_layers_on_both_sides(loaded, num_layers):
    with pytest.raises(ValueError, match=f"must be in 1..3 of 4, got {num_layers}"):
        FirstLayers(loaded.model, num_layers)


@pytest.mark.parametrize(
    ("resumes", "message"),
    [
        ({0: (1, 5)}, "hidden states of 5 rows for a segment of 4"),
        ({2: (1, 3)}, "a tree is gone on from with all its rows"),
        ({2: (1, 2)}, "a tree is gone on from with all its rows"),
        ({0: (1, 2), 1: (2, 2)}, r"one pass goes on from one layer, got \[1, 2\]"),
    ],
)
def test_what_cannot_be_gone_on_from_is_named(loaded, resumes, message):
    cache, size = filled_cache(loaded), loaded.config.hidden_size
    given = {i: LayerResume(layer, torch.zeros(n, size)) for i, (layer, n) in resumes.items()}
    with pytest.raises(ValueError, match=message):
        loaded.model.run(FlatBatch(IDS, SEGMENTS, None, given), cache)
