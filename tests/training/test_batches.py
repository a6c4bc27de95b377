"""Batches, their order, and the target as a teacher."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from foredraft.core.errors import ConfigError
from foredraft.models.load import LoadedModel
from foredraft.testing.models import target_logits
from foredraft.training.answers import Answers
from foredraft.training.batches import Order, make_batch
from foredraft.training.student import index_among, shifted
from foredraft.training.target import Target

CPU = torch.device("cpu")


def test_a_batch_is_cut_and_padded(answers: tuple[Answers, Answers]) -> None:
    training, _ = answers
    longest = max(range(len(training)), key=lambda i: len(training[i].tokens))
    batch = make_batch(training, [0, longest], 20, CPU)
    assert batch.lengths == (min(20, len(training[0].tokens)), 20)
    assert batch.whole[1] is False
    for row, i in enumerate((0, longest)):
        end = batch.lengths[row]
        assert batch.tokens[row, :end].tolist() == training[i].tokens[:end].tolist()
        assert batch.tokens[row, end:].tolist() == [0] * (batch.tokens.shape[1] - end)
        laws = batch.laws()[row].nonzero().flatten().tolist()
        assert laws == list(range(batch.prompts[row] - 1, end - 1))


def test_an_epoch_holds_every_usable_answer_once(answers: tuple[Answers, Answers]) -> None:
    training, _ = answers
    usable = [i for i in range(len(training)) if len(training[i].answer) > 1]
    order = Order(training, 256, 256, seed=1)
    steps = iter(range(1000))
    epochs: list[list[int]] = []
    for _ in range(2):
        epoch: list[int] = []
        while len(epoch) < len(usable):
            batch = order.indices(next(steps))
            longest = max(len(training[i].tokens) for i in batch)
            assert len(batch) == 1 or longest * len(batch) <= 256
            epoch += batch
        assert sorted(epoch) == usable
        epochs.append(epoch)
    assert epochs[0] != epochs[1]


def test_the_order_is_a_function_of_seed_and_step(answers: tuple[Answers, Answers]) -> None:
    training, _ = answers
    first = [Order(training, 256, 256, seed=1).indices(step) for step in range(30)]
    late = Order(training, 256, 256, seed=1)
    assert [late.indices(step) for step in reversed(range(30))] == first[::-1]
    assert [Order(training, 256, 256, seed=2).indices(step) for step in range(30)] != first


def test_answers_out_of_reach_are_left_out(answers: tuple[Answers, Answers]) -> None:
    training, _ = answers
    with pytest.raises(ConfigError, match="max_length 3"):
        Order(training, 256, 3, seed=0)


def test_laws_are_the_targets(
    answers: tuple[Answers, Answers], target: Target, loaded: LoadedModel
) -> None:
    training, _ = answers
    batch = make_batch(training, [0, 1, 2], 256, CPU)
    ids = torch.tensor([1, 4, 7])
    taps = target.taps(batch, ())
    found = target.laws(taps, batch.laws(), ids).logprobs
    logits = target_logits(loaded)
    row = 0
    for tokens, prompt, end in zip(batch.tokens, batch.prompts, batch.lengths, strict=True):
        for position in range(prompt - 1, end - 1):
            expected = logits(tuple(tokens[: position + 1].tolist())).log_softmax(-1)[ids]
            assert torch.allclose(found[row], expected, atol=1e-4)
            row += 1
    assert row == len(found)


def test_depths_are_what_enters_layers(
    answers: tuple[Answers, Answers], target: Target, loaded: LoadedModel
) -> None:
    training, _ = answers
    batch = make_batch(training, [3], 256, CPU)
    count = loaded.config.num_layers
    taps = target.taps(batch, (0, 1, count))
    assert torch.equal(taps.depths[0], target.embed(batch.tokens))
    assert torch.equal(taps.depths[2], taps.last)
    alone = target.taps(replace(batch, tokens=batch.tokens), (1,))
    assert torch.equal(taps.depths[1], alone.depths[0])


def test_company_changes_no_tap(answers: tuple[Answers, Answers], target: Target) -> None:
    training, _ = answers
    together = make_batch(training, [5, 6], 256, CPU)
    alone = make_batch(training, [6], 256, CPU)
    end = alone.lengths[0]
    both = target.taps(together, (2,)).depths[0][1, :end]
    assert torch.allclose(both, target.taps(alone, (2,)).depths[0][0], atol=1e-5)


def test_finding_ids() -> None:
    ids = torch.tensor([2, 5, 9])
    assert index_among(ids, torch.tensor([9, 2, 3, 11, 5])).tolist() == [2, 0, -1, -1, 1]


def test_shifting() -> None:
    grid = torch.tensor([[1, 2, 3]])
    assert shifted(grid, 1, fill=-1).tolist() == [[2, 3, -1]]
    assert shifted(grid, 0).tolist() == [[1, 2, 3]]
    assert shifted(grid, 7).tolist() == [[0, 0, 0]]


def test_a_window_of_lengths_is_sorted(answers: tuple[Answers, Answers]) -> None:
    """Little is padded: the sequences of a batch are of about one length."""
    training, _ = answers
    order = Order(training, 256, 256, seed=0)
    padded = real = 0
    for step in range(order.steps_per_epoch):
        lengths = [len(training[i].tokens) for i in order.indices(step)]
        padded += max(lengths) * len(lengths)
        real += int(np.sum(lengths))
    assert real > 0.85 * padded
