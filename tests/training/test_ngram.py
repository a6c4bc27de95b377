"""N-gram tables from answers: counted as by hand, pruned without harm, better than their parts."""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from foredraft.cli.train_ngram import ngram
from foredraft.core.errors import UserError
from foredraft.drafters.ngram_blend import starting_weights
from foredraft.drafters.ngram_table_file import NgramTableFile
from foredraft.testing.ngram_tables import levels_of
from foredraft.training.answers import Answer, Answers, Manifest, write_manifest, write_shard
from foredraft.training.ngram import NgramRecipe, contexts_of, pair, replay, train_ngram
from foredraft.training.ngram_counts import count, informative, packed, pruned, windows
from foredraft.training.ngram_weights import FitOptions, examples, fit

V = 40
SEQUENCES = st.lists(st.lists(st.integers(0, 4), max_size=15), max_size=5)


@given(SEQUENCES, st.integers(1, 4))
def test_sorted_windows_count_what_dictionaries_count(sequences, order) -> None:
    """A prompt of one token before answers of the rest, against counts of whole texts."""
    pairs = [(text[:1], text[1:]) for text in sequences]
    found = packed(count(windows(pairs, order), order, 4), V)
    wanted = levels_of(sequences, order, V)
    for one, other in zip(found, wanted, strict=True):
        assert len(one.arrays()) == len(other.arrays())
        for mine, plain in zip(one.arrays(), other.arrays(), strict=True):
            np.testing.assert_array_equal(mine, plain)


def test_prompts_are_contexts_and_are_not_predicted() -> None:
    rows = windows([([7, 8, 9], [1, 2])], 2)
    assert rows.tolist() == [[1, 9, 8], [2, 1, 9]]
    assert windows([([], [1, 2])], 2).tolist() == [[1, -1, -1], [2, 1, -1]]
    assert windows([], 2).shape == (0, 3)


@given(SEQUENCES, st.integers(1, 4))
def test_a_pruned_table_is_a_trie_of_what_is_wanted(sequences, least) -> None:
    levels = count(windows([(text[:1], text[1:]) for text in sequences], 3), 3, 4)
    wanted = informative(levels, [1, least, least])
    kept = pruned(levels, wanted)
    best = dict(paths(levels))
    left = {path for path, _ in paths(kept)}
    for path, (total, first) in best.items():
        keeps = len(path) == 1 or total >= least or first != best[path[:-1]][1]
        assert path in left if keeps else True
        longer = any(other[: len(path)] == path for other in left)
        assert (path in left) == longer


def paths(levels):
    """(context, the latest token first) -> (total, likeliest token)."""
    names = [()]
    found = []
    for level in levels:
        names = [
            (*names[parent], token)
            for parent, token in zip(level.parents.tolist(), level.tokens.tolist(), strict=True)
        ]
        found += zip(
            names, zip(level.totals.tolist(), level.best.tolist(), strict=True), strict=True
        )
    return found


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Answers of a source with habits: phrases that it says in any order."""
    draws = random.Random(3)
    phrases = [[draws.randrange(V) for _ in range(6)] for _ in range(12)]
    manifest = Manifest(
        "toy", "0" * 64, "float32", V, "0" * 64, "0" * 64, 120, 0, (0.0,), 60, 0, 128, {}
    )
    answers = []
    for number in range(120):
        said = [token for _ in range(8) for token in draws.choice(phrases)]
        answers.append(Answer(np.array([number % V, 3]), np.array(said), number, 0.0))
    directory = tmp_path_factory.mktemp("answers")
    write_manifest(directory, manifest)
    write_shard(directory, 0, manifest, answers)
    return directory


def test_a_trained_table_drafts_habits_and_knows_how_sure_it_is(data, tmp_path) -> None:
    recipe = NgramRecipe(order=3, own_orders=(1, 2, 4), fit=FitOptions(epochs=8, batch_size=128))
    made = train_ngram(Answers.open(data), tmp_path / "toy.ngrams", recipe, held_out=0.3)
    assert made.held_out.mean_acceptance_length > 2.5
    table = NgramTableFile.open(made.path)
    assert table.header.target == "toy"
    assert made.num_bytes == made.path.stat().st_size
    stated = sum(each for each, _, _ in made.held_out.calibration)
    right = sum(each for _, each, _ in made.held_out.calibration)
    judged = sum(each for _, _, each in made.held_out.calibration)
    assert abs(stated - right) / judged < 0.05
    assert sum(made.held_out.accepted) + made.held_out.num_steps >= made.held_out.num_tokens


def test_fitting_makes_the_law_likelier_and_repeats_itself(data, tmp_path) -> None:
    _, away = Answers.open(data).split(0.3)
    recipe = NgramRecipe(order=2, own_orders=(1,))
    train_ngram(Answers.open(data), tmp_path / "t.ngrams", recipe, held_out=0.3)
    table = NgramTableFile.open(tmp_path / "t.ngrams")
    found = examples(table, [pair(each) for each in away], 400)
    assert found.cells.max() <= table.layout.num_cells
    once, loss = fit(table.layout, found, FitOptions(epochs=6, batch_size=64))
    again, _ = fit(table.layout, found, FitOptions(epochs=6, batch_size=64))
    _, first = fit(table.layout, found, FitOptions(epochs=1, batch_size=64, learning_rate=1e-9))
    np.testing.assert_array_equal(once, again)
    assert loss < first
    assert not np.array_equal(once, starting_weights(table.layout))


def test_played_answers_are_counted_as_steps_would_be(data, tmp_path) -> None:
    """By hand: draft, keep what is right, add one."""
    train_ngram(Answers.open(data), tmp_path / "t.ngrams", NgramRecipe(order=2), held_out=0.3)
    table = NgramTableFile.open(tmp_path / "t.ngrams")
    pairs = [pair(each) for each in Answers.open(data)[:3]]
    whole = replay(table, pairs, 4)
    assert whole.num_tokens == sum(len(answer) - 1 for _, answer in pairs)
    # The last step of an answer has no token after it.
    assert whole.num_tokens - whole.num_steps <= sum(whole.accepted) <= whole.num_tokens
    assert list(whole.accepted) == sorted(whole.accepted, reverse=True)
    assert replay(table, [], 4).mean_acceptance_length == 0.0


def test_a_recipe_decides_what_is_kept(data) -> None:
    pairs = [pair(each) for each in Answers.open(data)]
    many = contexts_of(pairs, NgramRecipe(order=3, least_counts=(1, 1, 1)))
    few = contexts_of(pairs, NgramRecipe(order=3, least_counts=(1, 5, 50)))
    assert len(many[0]) == len(few[0])
    assert sum(map(len, few)) < sum(map(len, many))


def test_too_few_answers_are_refused(data, tmp_path) -> None:
    with pytest.raises(UserError, match="2 answers are too few"):
        train_ngram(Answers.open(data)[:2], tmp_path / "t.ngrams")


def test_the_command_writes_a_table(data, tmp_path) -> None:
    import typer

    app = typer.Typer()
    app.command()(ngram)
    out = tmp_path / "t.ngrams"
    run = CliRunner().invoke(
        app, ["toy", "--data", str(data), "--out", str(out), "--held-out", "0.3", "--json"]
    )
    assert run.exit_code == 0, run.output
    record = json.loads(run.stdout.splitlines()[-1])
    assert record["bytes"] == out.stat().st_size
    assert NgramTableFile.open(out).header.vocab_size == V
    other = CliRunner().invoke(app, [str(tmp_path), "--data", str(data), "--out", str(out)])
    assert other.exit_code != 0
