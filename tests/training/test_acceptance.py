"""Acceptance measured on answers: the walk itself, and that an engine counts the same."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from foredraft import LLM, SamplingParams
from foredraft.models.fingerprint import fingerprint
from foredraft.models.load import LoadedModel
from foredraft.training.acceptance import Measuring, accuracies, measured, replay
from foredraft.training.answers import Answers
from foredraft.training.batches import Batch, make_batch
from foredraft.training.begin import choose_ids, new_eagle3, new_medusa
from foredraft.training.draft import DraftModelStudent, new_draft, reading_of
from foredraft.training.eagle3 import Eagle3Student
from foredraft.training.medusa import MedusaStudent
from foredraft.training.opening import open_student
from foredraft.training.reduced_tokenizer import needed_ids
from foredraft.training.student import Lesson, Objective, Student, shifted
from foredraft.training.target import Target

NONE = [9, 9, 9]


class Scripted:
    """Drafts the answer itself, but for every third position; the second best is right there."""

    num_drafts = 2
    first_pending = 1
    module = nn.Module()

    def lesson(self, batch: Batch) -> Lesson:
        raise AssertionError("nothing is learned here")

    def drafts(self, batch: Batch, ranks: int = 1) -> Tensor:
        right = torch.stack([shifted(batch.tokens, 1), shifted(batch.tokens, 2)], dim=2)
        wrong = (right + 1) % 32
        third = torch.arange(batch.tokens.shape[1])[None, :, None] % 3 == 0
        best = torch.where(third, wrong, right)
        found = torch.stack([best, torch.where(third, right, wrong)], dim=-1)
        # Nothing before the first pending token, as students have it.
        for row, prompt in enumerate(batch.prompts):
            found[row, :prompt] = -1
        return found[..., :ranks]

    def save(self, directory: Path) -> None:
        raise AssertionError("nothing is kept here")


def test_a_walk_by_hand() -> None:
    """Prompt 0; answer 1 2 3 4 5 6: two accepted, one recovered, none, and the rest."""
    tokens = [0, 1, 2, 3, 4, 5, 6]
    drafts = [NONE, [2, 3, 9], NONE, NONE, NONE, [6, 9, 9], NONE]
    counts = replay(drafts, tokens, 1, 1, stopped=True)
    assert counts.num_steps == 1 + 3
    assert counts.num_drafts == 3
    assert counts.accepted_per_position == [2, 1, 0]
    assert counts.num_emitted_tokens == 6
    # The last step was cut on an accepted token: no extra one.
    assert counts.num_draft_emitted_tokens == 5


def test_a_limit_shortens_the_last_drafts() -> None:
    tokens = [0, 1, 2, 3, 4]
    drafts = [NONE, [2, 3, 4], NONE, NONE, NONE]
    open_end = replay(drafts, tokens, 1, 1, stopped=True)
    limited = replay(drafts, tokens, 1, 1, stopped=False)
    assert (open_end.num_draft_tokens, open_end.num_accepted_tokens) == (3, 3)
    assert (limited.num_draft_tokens, limited.num_accepted_tokens) == (2, 2)
    assert open_end.num_emitted_tokens == limited.num_emitted_tokens == 4


def test_a_drafter_without_features_begins_at_the_prompts_end() -> None:
    counts = replay([[1, 2, 9], *[NONE] * 3], [0, 1, 2, 3], 1, 0, stopped=True)
    assert counts.num_steps == counts.num_drafts == 1
    assert counts.num_accepted_tokens == 2


def test_accuracies_by_rank(answers: tuple[Answers, Answers], measuring: Measuring) -> None:
    """Every third position is right at the second rank, the others at the first."""
    found = accuracies(Scripted(), answers[1], measuring, ranks=2)
    for k, rates in enumerate(found):
        pending = [
            place
            for each in answers[1]
            if len(each.answer) > 1
            for place in range(len(each.prompt), len(each.tokens) - 1 - k)
        ]
        second = sum(place % 3 == 0 for place in pending) / len(pending)
        assert rates == pytest.approx([1 - second, second])


def test_answers_count_once_each(answers: tuple[Answers, Answers], measuring: Measuring) -> None:
    counts = measured(Scripted(), answers[1], measuring)
    usable = [each for each in answers[1] if len(each.answer) > 1]
    assert counts.num_emitted_tokens == sum(len(each.answer) for each in usable)
    parts = [measured(Scripted(), answers[1][i : i + 1], measuring) for i in range(len(answers[1]))]
    assert sum(each.num_accepted_tokens for each in parts) == counts.num_accepted_tokens


@pytest.mark.parametrize("size", [None, 16])
def test_an_engine_counts_the_same_of_a_draft_model(
    size: int | None,
    loaded: LoadedModel,
    target: Target,
    answers: tuple[Answers, Answers],
    measuring: Measuring,
    tmp_path: Path,
) -> None:
    training, held_out = answers
    always = {*needed_ids(loaded.tokenizer), *loaded.eos_ids}
    ids = choose_ids(training, size, loaded.config.vocab_size, always)
    decoder, tokenizer = new_draft(loaded, ids, 3)
    reading = reading_of(loaded, decoder, tokenizer)
    written = DraftModelStudent(decoder, tokenizer, reading, target, 3, Objective())
    written.save(tmp_path / "draft")
    student = open_student(tmp_path / "draft", target, "", 3)  # rounded as the engine's
    config = {
        "method": "draft_model",
        "model": str(tmp_path / "draft"),
        "num_speculative_tokens": 3,
        "draft_vocabulary": "same" if size is None else "shared",
        "policy": "fixed",
    }
    _check_served(student, loaded, held_out, measuring, config)


def teach(student: Student, answers: Answers) -> None:
    """A little, so that some of the drafts are accepted."""
    batch = make_batch(answers, range(24), 64, "cpu")
    optimizer = torch.optim.AdamW(student.module.parameters(), lr=1e-2)
    for _ in range(15):
        optimizer.zero_grad()
        student.lesson(batch).loss.backward()
        optimizer.step()


def _check_served(
    student: Student,
    loaded: LoadedModel,
    answers: Answers,
    measuring: Measuring,
    config: dict[str, object],
) -> None:
    """The counts of every single answer are the engine's."""
    usable = [i for i in range(len(answers)) if len(answers[i].answer) > 1]
    llm = LLM(loaded, speculative_config=config)
    params = SamplingParams(temperature=0, max_tokens=40)
    outputs = llm.generate([answers[i].prompt.tolist() for i in usable], params)
    accepted = 0
    for i, output in zip(usable, outputs, strict=True):
        assert list(output.token_ids) == answers[i].answer.tolist()
        served = output.metrics.speculative_decoding
        counts = measured(student, answers[i : i + 1], measuring)
        assert served.num_spec_steps == counts.num_drafts
        assert served.num_draft_tokens == counts.num_draft_tokens
        assert list(served.acceptance_histogram) == counts.histogram
        accepted += counts.num_accepted_tokens
    assert accepted > 0


@pytest.mark.parametrize("method", ["eagle3", "medusa"])
def test_an_engine_counts_the_same_of_a_head(
    method: str,
    loaded: LoadedModel,
    target: Target,
    answers: tuple[Answers, Answers],
    measuring: Measuring,
    tmp_path: Path,
) -> None:
    sha256 = fingerprint(loaded.path)
    begun: Student
    if method == "eagle3":
        head = new_eagle3(loaded, sha256, None, seed=0, copied=True)
        begun = Eagle3Student(head, target, 3, Objective())
    else:
        heads = new_medusa(loaded, sha256, None, num_heads=3, num_layers=1, shared_head=False)
        begun = MedusaStudent(heads, target, Objective())
    teach(begun, answers[0])
    begun.save(tmp_path / "head")
    student = open_student(tmp_path / "head", target, sha256, 3)
    config = {
        "method": method,
        "model": str(tmp_path / "head"),
        "num_speculative_tokens": 3,
        "draft_tree": "none",
        "policy": "fixed",
    }
    _check_served(student, loaded, answers[1], measuring, config)
