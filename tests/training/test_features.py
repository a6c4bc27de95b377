"""Features that were kept: the same as computed ones, and only used where they are whole."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from foredraft.cli.main import app
from foredraft.core.errors import UserError
from foredraft.models.fingerprint import fingerprint
from foredraft.models.load import LoadedModel
from foredraft.training.answers import Answers
from foredraft.training.batches import make_batch
from foredraft.training.features import Features
from foredraft.training.keeping import keep_features
from foredraft.training.opening import open_features
from foredraft.training.target import Target

DEPTHS = (1, 2, 4)
IDS = torch.tensor([1, 4, 7, 30])


@pytest.fixture
def data(answers_directory: Path, tmp_path: Path) -> Path:
    """A copy of the answers, to put features beside."""
    return Path(shutil.copytree(answers_directory, tmp_path / "answers"))


@pytest.fixture
def kept(data: Path, target: Target, loaded: LoadedModel) -> Features:
    return keep_features(target, fingerprint(loaded.path), data, DEPTHS, batch_tokens=300)


def test_they_are_what_the_target_computes(
    kept: Features, data: Path, target: Target, loaded: LoadedModel
) -> None:
    answers = Answers.open(data)
    batch = make_batch(answers, [40, 3, 17], 256, "cpu")  # of two shards
    reading = Target(loaded, kept)
    expected, found = target.taps(batch, (4, 1)), reading.taps(batch, (4, 1))
    for one, other in zip(
        (*expected.depths, expected.last), (*found.depths, found.last), strict=True
    ):
        assert torch.equal(one.to(torch.bfloat16), other.to(torch.bfloat16))
    places = batch.laws()
    one, other = target.laws(expected, places, IDS), reading.laws(found, places, IDS)
    assert torch.allclose(one.hidden, other.hidden, atol=0.03)
    assert torch.allclose(one.logprobs, other.logprobs, atol=0.1)


def test_answers_are_cut_as_batches_are(kept: Features, data: Path, loaded: LoadedModel) -> None:
    answers = Answers.open(data)
    whole, cut = (make_batch(answers, [5], length, "cpu") for length in (256, 12))
    reading = Target(loaded, kept)
    taps = reading.taps(cut, (2,))
    assert taps.depths[0].shape[1] == 12
    assert torch.equal(taps.depths[0], reading.taps(whole, (2,)).depths[0][:, :12])


def test_other_depths_are_computed(kept: Features, data: Path, loaded: LoadedModel) -> None:
    batch = make_batch(Answers.open(data), [0], 256, "cpu")
    reading = Target(loaded, kept)
    assert torch.equal(
        reading.taps(batch, (3,)).depths[0], Target(loaded).taps(batch, (3,)).depths[0]
    )


def test_a_run_that_was_stopped_goes_on(
    kept: Features, data: Path, target: Target, loaded: LoadedModel
) -> None:
    sha256 = fingerprint(loaded.path)
    first, last = (data / "features" / name for name in ("00000.hidden", "00001.normaliser"))
    written, content = first.stat().st_mtime_ns, last.read_bytes()
    last.unlink()
    with pytest.raises(UserError, match="not complete: give `foredraft train features` again"):
        open_features(data, sha256)
    keep_features(target, sha256, data, DEPTHS, batch_tokens=300)
    assert first.stat().st_mtime_ns == written
    assert last.read_bytes() == content
    assert open_features(data, sha256) is not None


def test_others_are_refused(
    kept: Features, data: Path, target: Target, loaded: LoadedModel
) -> None:
    with pytest.raises(UserError, match=r"of another model, .* that of the target is beef"):
        open_features(data, "beef")
    with pytest.raises(UserError, match=r"of depths \[1, 2, 4\], asked for are \[1, 2\]"):
        keep_features(target, fingerprint(loaded.path), data, (1, 2), batch_tokens=300)


@pytest.mark.parametrize(
    "damage", ["{", '{"format": "x"}', "[]", '{"format": "foredraft-features-1"}']
)
def test_a_damaged_statement_is_one_line(kept: Features, data: Path, damage: str) -> None:
    (data / "features" / "features.json").write_text(damage)
    with pytest.raises(UserError, match=r"cannot read .*features\.json"):
        open_features(data, kept.kept.target_sha256)


def test_a_file_that_was_cut_is_one_line(kept: Features, data: Path, loaded: LoadedModel) -> None:
    path = data / "features" / "00000.hidden"
    path.write_bytes(path.read_bytes()[: 2 * kept.kept.width])
    batch = make_batch(Answers.open(data), [5], 256, "cpu")
    with pytest.raises(UserError, match="is shorter than its answers"):
        Target(loaded, kept).taps(batch, DEPTHS)


def test_the_command_keeps_and_training_reads(
    data: Path, target_directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place = ["--kernels", "reference", "--dtype", "float32"]
    app(
        ["train", "features", str(target_directory), "--data", str(data), "--json", *place],
        standalone_mode=False,
    )
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert lines[-1]["tokens"] == lines[-1]["of"] == Answers.open(data).num_tokens
    asked = ["train", "eagle3", str(target_directory), "--data", str(data), "--steps", "2"]
    asked += [
        "--batch-tokens",
        "256",
        "--held-out",
        "0.15",
        "--precision",
        "float32",
        "--json",
        *place,
    ]
    losses = []
    for name in ("kept", "computed"):
        app([*asked, "--out", str(tmp_path / name)], standalone_mode=False)
        losses.append(json.loads(capsys.readouterr().out.splitlines()[0])["loss"])
        shutil.rmtree(data / "features", ignore_errors=True)
    assert losses[0] == pytest.approx(losses[1], rel=0.05)
