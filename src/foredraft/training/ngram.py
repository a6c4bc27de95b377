"""An n-gram table from a target's answers, and what it is worth on answers it was not made of.

Knows answers and tables; knows neither model nor engine: drafts are played against answers that are
there, thousands of tokens a second, with the drafter's own code. Of the held-out answers half fit
the weights of the experts, and the other half measure.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from foredraft.core.errors import UserError
from foredraft.drafters.ngram_blend import NO_TEXT, BlendLimits, Layout, starting_weights
from foredraft.drafters.ngram_table_file import Header, NgramTableFile, write_table
from foredraft.drafters.ngram_table_source import text_maker
from foredraft.training.answers import Answer, Answers, Manifest
from foredraft.training.ngram_counts import (
    Contexts,
    count,
    informative,
    packed,
    pruned,
    windows,
)
from foredraft.training.ngram_weights import FitOptions, examples, fit

Pair = tuple[Sequence[int], Sequence[int]]  # prompt, answer


@dataclass(frozen=True, slots=True)
class NgramRecipe:
    """How a table is made."""

    order: int = 5  # contexts of 1 to so many tokens
    own_orders: tuple[int, ...] = (1, 2, 3, 4, 5, 6, 8, 12, 16)
    max_next: int = 6  # tokens kept behind a context
    # Of each order: a context that was seen less often is kept if it changes the likeliest token.
    least_counts: tuple[int, ...] = (1, 2, 2, 2, 2)
    max_fit_tokens: int = 60_000  # of held-out answers, for the weights
    fit: FitOptions = field(default_factory=FitOptions)


@dataclass(frozen=True, slots=True)
class Replay:
    """Drafts played against answers: greedy chains of `accepted` at most so many tokens."""

    num_steps: int
    num_tokens: int
    accepted: tuple[int, ...]  # by position: drafts whose first so many tokens were right
    # By tenths of confidence: (stated sum, right, nodes) of those whose parent was right.
    calibration: tuple[tuple[float, int, int], ...]

    @property
    def mean_acceptance_length(self) -> float:
        return self.num_tokens / max(1, self.num_steps)

    @property
    def acceptance_by_position(self) -> list[float]:
        """Of all steps, how many had their first 1, 2, ... draft tokens accepted."""
        return [each / max(1, self.num_steps) for each in self.accepted]


@dataclass(frozen=True, slots=True)
class NgramReport:
    """What was made."""

    path: Path
    num_bytes: int
    num_tokens: int  # counted
    num_fit_tokens: int
    sizes: tuple[tuple[int, int], ...]  # of each order: contexts, what follows them
    loss: float  # nats a token, of the fit
    held_out: Replay


def train_ngram(
    answers: Answers,
    out: Path,
    recipe: NgramRecipe | None = None,
    held_out: float = 0.05,
    provenance: dict[str, str] | None = None,
    report: Callable[[str], None] = lambda line: None,
) -> NgramReport:
    """Make a table of `answers` and write it to `out`.

    Raises:
        UserError: too few answers: none to count, or none held out.
        OSError: the table can't be written.
    """
    recipe = recipe or NgramRecipe()
    training, away = answers.split(held_out)
    fitting, judging = [pair(each) for each in away[::2]], [pair(each) for each in away[1::2]]
    if not len(training) or not fitting or not judging:
        raise UserError(
            f"{len(answers)} answers are too few: {len(training)} to count, {len(away)} held out"
        )
    pairs = [pair(each) for each in training]
    levels = contexts_of(pairs, recipe)
    report(f"counted {training.num_answer_tokens} tokens: {sum(map(len, levels))} contexts")
    header = _header(answers.manifest, recipe, training.num_answer_tokens, provenance or {})
    layout = Layout(recipe.order, recipe.own_orders)
    arrays = packed(levels, answers.manifest.vocab_size)
    write_table(out, header, starting_weights(layout), arrays)
    data = examples(NgramTableFile.open(out), fitting, recipe.max_fit_tokens)
    report(f"fitting {layout.num_cells} weights to {len(data.right)} places")
    weights, loss = fit(layout, data, recipe.fit)
    write_table(out, header, weights, arrays)
    table = NgramTableFile.open(out)
    return NgramReport(
        out,
        out.stat().st_size,
        training.num_answer_tokens,
        len(data.right),
        table.header.sizes,
        loss,
        replay(table, judging),
    )


def pair(answer: Answer) -> Pair:
    """Prompt and answer as lists."""
    return answer.prompt.tolist(), answer.answer.tolist()


def contexts_of(pairs: Sequence[Pair], recipe: NgramRecipe) -> list[Contexts]:
    """The contexts that a table of this recipe keeps."""
    levels = count(windows(pairs, recipe.order), recipe.order, recipe.max_next)
    least = [*recipe.least_counts, *[recipe.least_counts[-1]] * recipe.order]
    return pruned(levels, informative(levels, least))


def replay(table: NgramTableFile, pairs: Sequence[Pair], num_speculative_tokens: int = 3) -> Replay:
    """Play greedy chains against answers; the first token of each is the prompt's pass's."""
    make = text_maker(table)
    limits = BlendLimits(num_speculative_tokens, 0.0)
    steps = tokens = 0
    accepted = np.zeros(num_speculative_tokens, np.int64)
    stated, right, judged = np.zeros(10), np.zeros(10, np.int64), np.zeros(10, np.int64)
    for prompt, answer in pairs:
        text, at = make(), 1
        text.extend([*prompt, *answer[:1]])
        while at < len(answer):
            made = text.draft(table, text.num_tokens, [], limits, None, NO_TEXT)
            drafted = made.tokens if made is not None else []
            alike = 0
            for token, said in zip(drafted, answer[at:], strict=False):
                if token != said:
                    break
                alike += 1
            accepted[:alike] += 1
            confidence = made.confidence if made is not None else []
            for i, value in enumerate(confidence[: min(alike + 1, len(answer) - at)]):
                tenth = min(9, int(10 * value))
                stated[tenth] += value
                right[tenth] += i < alike
                judged[tenth] += 1
            emitted = answer[at : at + alike + 1]
            text.extend(emitted)
            at += len(emitted)
            tokens += len(emitted)
            steps += 1
    bins = zip(stated.tolist(), right.tolist(), judged.tolist(), strict=True)
    return Replay(steps, tokens, tuple(accepted.tolist()), tuple(bins))


def _header(
    manifest: Manifest, recipe: NgramRecipe, num_tokens: int, provenance: dict[str, str]
) -> Header:
    made = {
        "answers": f"{num_tokens} tokens at temperatures {list(manifest.temperatures)}",
        "recipe": str(recipe),
        **provenance,
    }
    return Header(
        manifest.vocab_size,
        manifest.target,
        manifest.target_sha256,
        recipe.own_orders,
        (),
        "",
        made,
    )
