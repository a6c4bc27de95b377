"""EAGLE-3 and Medusa heads in training: what they draft, what they learn from, where they begin."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from foredraft.core.errors import ConfigError, ModelError
from foredraft.models.heads.eagle3 import Eagle3
from foredraft.models.heads.eagle3_checkpoint import load_eagle3
from foredraft.models.heads.medusa_checkpoint import load_medusa
from foredraft.models.load import LoadedModel
from foredraft.training.answers import Answers, Place
from foredraft.training.batches import Batch, make_batch
from foredraft.training.begin import StoredWeights, choose_ids, new_eagle3, new_medusa, token_counts
from foredraft.training.eagle3 import Eagle3Student
from foredraft.training.losses import acceptance, kl
from foredraft.training.medusa import MedusaStudent
from foredraft.training.student import Objective
from foredraft.training.target import Target

CPU = torch.device("cpu")
IDS = torch.tensor([1, 2, 3, 5, 8, 9, 10, 11, 13, 17, 20, 22, 24, 25, 27, 28, 30])
DEPTHS = (2, 2, 1)  # of a target of four layers: 2, the middle, 3 before the end


@pytest.fixture
def batch(answers: tuple[Answers, Answers]) -> Batch:
    return make_batch(answers[0], [0, 4, 9], 24, CPU)


def _eagle(loaded: LoadedModel, target: Target, **objective: str) -> Eagle3Student:
    head = new_eagle3(loaded, "f00d", IDS, seed=7, copied=False)
    return Eagle3Student(head, target, 3, Objective(**objective))


def _drawn_alone(head: Eagle3, target: Target, tokens: list[int], at: int) -> list[Tensor]:
    """Logits of each draft while `tokens[at + 1]` is pending, as an engine comes to them: one row
    after the other behind the rows that read the target's features.
    """
    whole = torch.tensor([tokens])
    batch = Batch(whole, (1,), (len(tokens),), (True,), (Place(0, 0),))
    features = target.taps(batch, sorted(set(DEPTHS))).depths
    by_depth = dict(zip(sorted(set(DEPTHS)), features, strict=True))
    rows = head.fuse(torch.cat([by_depth[depth][:, : at + 1] for depth in DEPTHS], dim=-1))
    logits: list[Tensor] = []
    for step in range(3):
        length = at + 1 + step
        embeddings = target.embed(whole[:, 1 : length + 1])
        out = head(embeddings, rows, torch.arange(length))
        rows = torch.cat([rows, out[:, -1:]], dim=1)
        logits.append(head.logits(out[:, -1])[0])
    return logits


def test_training_time_test_drafts_as_an_engine_would(
    loaded: LoadedModel, target: Target, batch: Batch
) -> None:
    head = new_eagle3(loaded, None, IDS, seed=7, copied=False)
    head.config = replace(head.config, feature_layers=DEPTHS)
    student = Eagle3Student(head, target, 3, Objective())
    drafts = student.drafts(batch)[..., 0]
    row = 1
    tokens = batch.tokens[row, : batch.lengths[row]].tolist()
    first = batch.prompts[row]  # the first pending token that can be drafted behind
    assert (drafts[row, :first] == -1).all()
    for pending in range(first, len(tokens) - 3):
        with torch.no_grad():
            alone = _drawn_alone(head, target, tokens, pending - 1)
        assert drafts[row, pending].tolist() == [int(IDS[each.argmax()]) for each in alone]


def test_the_loss_is_the_weighted_sum_over_steps(
    loaded: LoadedModel, target: Target, batch: Batch
) -> None:
    """Against losses put together row by row."""
    head = new_eagle3(loaded, None, IDS, seed=7, copied=False)
    head.config = replace(head.config, feature_layers=DEPTHS)
    lesson = Eagle3Student(head, target, 3, Objective(decay=0.5)).lesson(batch)
    laws = torch.zeros(*batch.tokens.shape, len(IDS))
    laws[batch.laws()] = target.laws(target.taps(batch, ()), batch.laws(), IDS).logprobs
    head.requires_grad_(False)
    found: list[list[Tensor]] = [[], [], []]
    kept: list[list[Tensor]] = [[], [], []]
    for row, (prompt, end) in enumerate(zip(batch.prompts, batch.lengths, strict=True)):
        tokens = batch.tokens[row, :end].tolist()
        for at in range(prompt - 1, end - 1):
            alone = _drawn_alone(head, target, [*tokens, 0, 0], at)
            for step in range(3):
                place = at + 1 + step
                if place < end - 1 and tokens[place + 1] in IDS:
                    law = laws[row, place][None]
                    found[step].append(kl(law, alone[step][None].log_softmax(-1)))
                    kept[step].append(acceptance(law, alone[step][None].log_softmax(-1)))
    means = [torch.cat(each).mean() for each in found]
    expected = means[0] + 0.5 * means[1] + 0.25 * means[2]
    assert float(lesson.loss.detach()) == pytest.approx(float(expected), rel=1e-4)
    means = [float(torch.cat(each).mean()) for each in kept]
    assert lesson.acceptance.tolist() == pytest.approx(means, rel=1e-4)


@pytest.mark.parametrize("weighting", ["decay", "survival"])
def test_every_parameter_learns(
    weighting: str, loaded: LoadedModel, target: Target, batch: Batch
) -> None:
    student = _eagle(loaded, target, weighting=weighting)
    student.lesson(batch).loss.backward()
    for name, parameter in student.module.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.abs().sum() > 0, name


def test_many_rows_are_compared_in_parts(
    loaded: LoadedModel, target: Target, batch: Batch, monkeypatch: pytest.MonkeyPatch
) -> None:
    gradients, losses = [], []
    for at_once in (512, 7):
        monkeypatch.setattr("foredraft.training.student._LOGITS_AT_ONCE", at_once * len(IDS))
        monkeypatch.setattr("foredraft.training.target._ROWS_AT_ONCE", at_once)
        student = _eagle(loaded, target)
        lesson = student.lesson(batch)
        lesson.loss.backward()
        losses.append(float(lesson.loss.detach()))
        gradients.append(student.module.get_parameter("fc.weight").grad)
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    assert gradients[0] is not None
    assert gradients[1] is not None
    assert torch.allclose(gradients[0], gradients[1], rtol=1e-3, atol=1e-6)


def test_an_eagle_head_begins_with_the_targets_head(loaded: LoadedModel) -> None:
    weights = StoredWeights(loaded)
    head = new_eagle3(loaded, "f00d", IDS, seed=0, copied=True)
    assert torch.equal(head.lm_head.weight, weights.head()[IDS])
    assert torch.equal(head.norm.weight, weights.norm("model.norm"))
    down = weights.tensor("model.layers.3.mlp.down_proj.weight")
    assert torch.equal(head.midlayer.mlp.down_proj.weight, down)
    again = new_eagle3(loaded, "f00d", IDS, seed=0, copied=True)
    other = new_eagle3(loaded, "f00d", IDS, seed=1, copied=True)
    assert torch.equal(head.fc.weight, again.fc.weight)
    assert not torch.equal(head.fc.weight, other.fc.weight)


def test_medusa_heads_begin_as_the_targets_own(
    loaded: LoadedModel, target: Target, batch: Batch
) -> None:
    """Each head is the identity and the target's vocabulary head: it says the next token."""
    heads = new_medusa(loaded, None, None, num_heads=2, num_layers=1, shared_head=False)
    drafts = MedusaStudent(heads, target, Objective()).drafts(batch)[..., 0]
    row, end = 0, batch.lengths[0]
    for pending in range(batch.prompts[row], end):
        assert drafts[row, pending].tolist() == [int(batch.tokens[row, pending])] * 2


@pytest.mark.parametrize("shared", [False, True])
def test_medusa_learns_what_comes_later(
    shared: bool, loaded: LoadedModel, target: Target, batch: Batch
) -> None:
    heads = new_medusa(loaded, None, IDS, num_heads=2, num_layers=1, shared_head=shared)
    student = MedusaStudent(heads, target, Objective(loss="cross_entropy"))
    first = student.lesson(batch).loss
    optimizer = torch.optim.AdamW(heads.parameters(), lr=3e-2)
    for _ in range(12):
        optimizer.zero_grad()
        student.lesson(batch).loss.backward()
        optimizer.step()
    assert float(student.lesson(batch).loss.detach()) < 0.7 * float(first.detach())


def test_the_target_stays_as_it_is(loaded: LoadedModel, target: Target, batch: Batch) -> None:
    before = target.taps(batch, ()).last
    _eagle(loaded, target).lesson(batch).loss.backward()
    assert torch.equal(target.taps(batch, ()).last, before)


def test_what_is_saved_is_loaded_for_this_target_alone(
    loaded: LoadedModel, target: Target, batch: Batch, tmp_path: Path
) -> None:
    student = _eagle(loaded, target)
    student.save(tmp_path / "head")
    again = load_eagle3(tmp_path / "head", loaded.config, target_sha256="f00d")
    assert again.config == student.module.config
    assert torch.equal(again.draft_ids, IDS)
    with pytest.raises(ModelError, match="another target"):
        load_eagle3(tmp_path / "head", loaded.config, target_sha256="beef")


def test_accuracies_go_with_the_heads(loaded: LoadedModel, target: Target, tmp_path: Path) -> None:
    heads = new_medusa(loaded, "f00d", None, num_heads=2, num_layers=1, shared_head=False)
    student = MedusaStudent(heads, target, Objective())
    student.note_accuracies([[0.5, 0.25], [0.125, 0.0]])
    student.save(tmp_path / "heads")
    found = load_medusa(tmp_path / "heads", loaded.config).config.accuracies
    assert found == ((0.5, 0.25), (0.125, 0.0))


def test_the_draft_vocabulary_is_what_is_said_most(
    answers: tuple[Answers, Answers], loaded: LoadedModel
) -> None:
    training, _ = answers
    counts = token_counts(training, loaded.config.vocab_size)
    assert int(counts.sum()) == training.num_answer_tokens
    ids = choose_ids(training, 8, loaded.config.vocab_size, loaded.eos_ids)
    assert ids is not None
    assert ids.tolist() == sorted(ids.tolist())
    assert set(loaded.eos_ids) <= set(ids.tolist())
    least = min(int(counts[i]) for i in ids if int(i) not in loaded.eos_ids)
    left = [int(counts[i]) for i in range(len(counts)) if i not in ids]
    assert least >= max(left)
    assert choose_ids(training, None, loaded.config.vocab_size, ()) is None
    size = loaded.config.vocab_size
    assert choose_ids(training, size, size, ()) is None
    with pytest.raises(ConfigError, match=f"of 999 tokens was asked for; the target has {size}"):
        choose_ids(training, 999, size, ())
    with pytest.raises(ConfigError, match="at least 2"):
        choose_ids(training, 1, loaded.config.vocab_size, ())
