"""One pass of the target over all its answers, whose hidden states are kept.

Knows answers, the target and `features`; knows no student and no option.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch

from foredraft.training.answers import Answers
from foredraft.training.batches import Batch, grouped, lengths_of, make_batch
from foredraft.training.features import Features, Kept
from foredraft.training.target import Target


def keep_features(
    target: Target,
    target_sha256: str,
    data: Path,
    depths: Sequence[int],
    *,
    batch_tokens: int,
    report: Callable[[int, int], None] = lambda done, total: None,
) -> Features:
    """Keep what enters the layers `depths` for all answers in `data`, shard by shard; shards that
    are there stay. `report` is told how many tokens are done, of how many.

    Raises:
        UserError: `data` holds no answers, or features of other depths or of another model.
        OSError: a shard can't be written.
    """
    answers = Answers.open(data)
    kept = Kept(target_sha256, tuple(sorted(depths)), target.loaded.config.hidden_size)
    features = Features.begin(data, kept)
    total, done = answers.num_tokens, 0
    for shard in answers.shards:
        part = answers.of_shard(shard)
        if not features.covers([shard]):
            _keep_shard(target, part, features, shard, batch_tokens)
        done += part.num_tokens
        report(done, total)
    return features


def _keep_shard(
    target: Target, answers: Answers, features: Features, shard: int, batch_tokens: int
) -> None:
    hidden = torch.zeros(answers.num_tokens, features.kept.width, dtype=torch.bfloat16)
    normalisers = torch.zeros(answers.num_tokens)
    longest = max(len(each.tokens) for each in answers)
    lengths = lengths_of(answers, longest)
    order = np.argsort(lengths, kind="stable")
    order = order[lengths[order] > 0]
    for indices in grouped(order, lengths[order], batch_tokens):
        batch = make_batch(answers, indices.tolist(), longest, target.device)
        taps = target.taps(batch, features.kept.depths)
        states = torch.cat([*taps.depths, taps.last], dim=-1).to(torch.bfloat16).cpu()
        laws = torch.zeros(batch.tokens.shape, device=target.device)
        laws[batch.laws()] = target.normalisers(taps.last[batch.laws()])
        for row, (place, length) in enumerate(_places(batch)):
            rows = slice(place, place + length)
            hidden[rows], normalisers[rows] = states[row, :length], laws[row, :length].cpu()
    features.write(shard, hidden, normalisers)


def _places(batch: Batch) -> list[tuple[int, int]]:
    """Where each sequence starts in its shard, and its length."""
    return [(at.start, length) for at, length in zip(batch.places, batch.lengths, strict=True)]
