"""`foredraft train eagle3 | medusa | draft`: the students, each with its own options.

Knows option names and which defaults suit which student; `cli.train_run` runs them.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Option

from foredraft.cli.option_groups import option_groups
from foredraft.cli.options import ModelArgument, PlaceOptions
from foredraft.cli.train_options import DataOption, OutOption, ResultOptions, TrainingOptions
from foredraft.cli.train_run import Course, Files, Source, train

if TYPE_CHECKING:
    from torch import Tensor

    from foredraft.training.acceptance import Measuring
    from foredraft.training.answers import Answers
    from foredraft.training.student import Student

_RANKS = 10  # of a Medusa head, whose accuracy a tree is chosen by


@option_groups
def eagle3(
    model: ModelArgument,
    data: DataOption,
    out: OutOption,
    num_speculative_tokens: Annotated[
        int, Option(help="Steps of training-time test.", metavar="N", min=1, max=16)
    ] = 4,
    from_scratch: Annotated[
        bool, Option("--from-scratch", help="No copy of the target's last layer to begin with.")
    ] = False,
    *,
    training: TrainingOptions,
    place: PlaceOptions,
    results: ResultOptions,
) -> None:
    """Train an EAGLE-3 head: one layer that reads the target's hidden states."""

    def begin(source: Source) -> Student:
        from foredraft.training.begin import new_eagle3
        from foredraft.training.eagle3 import Eagle3Student

        head = new_eagle3(
            source.target.loaded,
            source.sha256,
            _ids(source, training),
            seed=training.seed,
            copied=not from_scratch,
        )
        return Eagle3Student(
            head.to(source.target.device), source.target, num_speculative_tokens, source.objective
        )

    options = {
        "num_speculative_tokens": num_speculative_tokens,
        "from_scratch": from_scratch,
    }
    config = {"num_speculative_tokens": num_speculative_tokens}
    course = Course("eagle3", options, 1e-3, begin, config)
    train(course, model, Files(data, out, results), training, place)


@option_groups
def medusa(
    model: ModelArgument,
    data: DataOption,
    out: OutOption,
    num_heads: Annotated[
        int, Option(help="Positions guessed ahead.", metavar="N", min=1, max=16)
    ] = 4,
    num_layers: Annotated[
        int, Option(help="Residual blocks of a head.", metavar="N", min=1, max=16)
    ] = 1,
    own_heads: Annotated[
        bool,
        Option("--own-heads", help="Each with a vocabulary head of its own, as the paper's."),
    ] = False,
    *,
    training: TrainingOptions,
    place: PlaceOptions,
    results: ResultOptions,
) -> None:
    """Train Medusa heads: each guesses one position ahead from the last hidden state."""

    def begin(source: Source) -> Student:
        from foredraft.training.begin import new_medusa
        from foredraft.training.medusa import MedusaStudent

        heads = new_medusa(
            source.target.loaded,
            source.sha256,
            _ids(source, training),
            num_heads=num_heads,
            num_layers=num_layers,
            shared_head=not own_heads,
        )
        return MedusaStudent(heads.to(source.target.device), source.target, source.objective)

    def finish(best: Path, source: Source, held_out: Answers, measuring: Measuring) -> None:
        from foredraft.models.heads.medusa_checkpoint import load_medusa
        from foredraft.training.acceptance import accuracies
        from foredraft.training.begin import StoredWeights
        from foredraft.training.medusa import MedusaStudent

        loaded = source.target.loaded
        heads = load_medusa(best, loaded.config, head=StoredWeights(loaded).head())
        student = MedusaStudent(heads.to(loaded.device), source.target, source.objective)
        ranks = min(_RANKS, heads.config.num_outputs)
        student.note_accuracies(
            accuracies(student, held_out[: training.evaluation_answers], measuring, ranks)
        )
        student.save(best)

    options = {
        "num_heads": num_heads,
        "num_layers": num_layers,
        "own_heads": own_heads,
    }
    course = Course("medusa", options, 1e-3, begin, {}, finish)
    train(course, model, Files(data, out, results), training, place)


@option_groups
def draft(
    model: ModelArgument,
    data: DataOption,
    out: OutOption,
    layers: Annotated[
        int, Option(help="Of the target's, the first and the last.", metavar="N", min=1)
    ] = 4,
    num_speculative_tokens: Annotated[
        int, Option(help="Drafts that acceptance is measured at.", metavar="N", min=1, max=16)
    ] = 4,
    *,
    training: TrainingOptions,
    place: PlaceOptions,
    results: ResultOptions,
) -> None:
    """Train a draft model: a few of the target's layers, over fewer tokens."""

    def begin(source: Source) -> Student:
        from foredraft.training.draft import DraftModelStudent, new_draft, reading_of
        from foredraft.training.reduced_tokenizer import needed_ids

        loaded = source.target.loaded
        needed = (
            needed_ids(loaded.tokenizer) if training.draft_vocab_size is not None else frozenset()
        )
        decoder, tokenizer = new_draft(loaded, _ids(source, training, needed), layers)
        reading = reading_of(loaded, decoder, tokenizer)
        return DraftModelStudent(
            decoder.to(loaded.device),
            tokenizer,
            reading,
            source.target,
            num_speculative_tokens,
            source.objective,
        )

    options = {
        "layers": layers,
        "num_speculative_tokens": num_speculative_tokens,
    }
    config: dict[str, Any] = {"num_speculative_tokens": num_speculative_tokens}
    if training.draft_vocab_size is not None:
        config["draft_vocabulary"] = "shared"
    course = Course("draft_model", options, 3e-4, begin, config)
    train(course, model, Files(data, out, results), training, place)


def _ids(
    source: Source, training: TrainingOptions, needed: frozenset[int] = frozenset()
) -> Tensor | None:
    """The ids to draft; what ends an answer is always among them."""
    from foredraft.training.begin import choose_ids

    loaded = source.target.loaded
    always = {*needed, *loaded.eos_ids}
    size = training.draft_vocab_size
    return choose_ids(source.training, size, loaded.config.vocab_size, always)
