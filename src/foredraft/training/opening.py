"""A target's answers and finished students, found again by their directories.

Knows which answers belong to which target and what kind of drafter a directory holds; knows no
loop.
"""

from __future__ import annotations

from pathlib import Path

from foredraft.core.errors import ConfigError, ModelError, UserError
from foredraft.models.fingerprint import fingerprint
from foredraft.models.heads.eagle3_checkpoint import PLAIN, SPECULATORS, load_eagle3
from foredraft.models.heads.medusa_checkpoint import load_medusa
from foredraft.models.hf_config import read_json
from foredraft.models.load import LoadedModel, load_model
from foredraft.training.answers import Answers, read_manifest
from foredraft.training.begin import StoredWeights
from foredraft.training.draft import DraftModelStudent, Reading, load_draft
from foredraft.training.eagle3 import Eagle3Student
from foredraft.training.features import Features
from foredraft.training.medusa import MedusaStudent
from foredraft.training.student import Objective, Student
from foredraft.training.target import Target

EAGLE3, MEDUSA, DRAFT_MODEL = "eagle3", "medusa", "draft_model"


def check_target(directory: Path, loaded: LoadedModel) -> str:
    """The checksum of `loaded`, whose answers are in the directory.

    Raises UserError for a directory without answers, ConfigError for another model's.
    """
    manifest, sha256 = read_manifest(directory), fingerprint(loaded.path)
    if manifest.target_sha256 != sha256:
        raise ConfigError(
            f"{str(directory)!r} holds answers of another model: of {manifest.target!r}, "
            f"checksum {manifest.target_sha256[:12]}; that of {loaded.name!r} is {sha256[:12]}"
        )
    return sha256


def open_answers(
    directory: Path, loaded: LoadedModel, held_out: float
) -> tuple[Answers, Answers, str]:
    """Answers to train on, those held out, and the target's checksum.

    Raises UserError for a directory without answers, ConfigError for another model's and for a
    share that leaves one side empty.
    """
    sha256 = check_target(directory, loaded)
    answers = Answers.open(directory)
    if not 0 < held_out < 1:
        raise ConfigError(f"the share that is held out must be between 0 and 1, got {held_out:g}")
    training, away = answers.split(held_out)
    if not len(training) or not len(away):
        raise ConfigError(
            f"of {len(answers)} answers {len(training)} are left to train on and {len(away)} are "
            "held out; both take more answers, or another share"
        )
    return training, away, sha256


def open_features(directory: Path, sha256: str) -> Features | None:
    """What is kept beside answers; None: nothing is.

    Raises UserError for those of another target, and for some answers only: training on without
    them would be many times slower, and not be seen.
    """
    features = Features.open(directory, sha256)
    if features is not None and not features.covers(Answers.open(directory).shards):
        raise UserError(
            f"the features in {str(directory)!r} are not complete: give `foredraft train features` "
            "again, or remove them"
        )
    return features


def kind_of(directory: Path) -> str:
    """EAGLE3, MEDUSA or DRAFT_MODEL. Raises ModelError for a directory without config.json."""
    if not (directory / "config.json").exists():
        raise ModelError(f"{directory}: no config.json; give a head's or a draft model's directory")
    values = read_json(directory / "config.json")
    if values.get("architectures") in ([PLAIN], [SPECULATORS]):
        return EAGLE3
    if values.get("model_type") == "medusa" or "medusa_num_heads" in values:
        return MEDUSA
    return DRAFT_MODEL


def open_student(directory: Path, target: Target, sha256: str, num_drafts: int | None) -> Student:
    """What is in a directory, to be measured at chains of `num_drafts` (None: 4, or all heads of
    Medusa). Raises ModelError for what can't be loaded or belongs to another target, ConfigError
    for more drafts than there are heads.
    """
    loaded, objective = target.loaded, Objective()
    kind = kind_of(directory)
    if kind == EAGLE3:
        head = load_eagle3(directory, loaded.config, target_sha256=sha256)
        return Eagle3Student(head.to(target.device), target, num_drafts or 4, objective)
    if kind == MEDUSA:
        weights = StoredWeights(loaded).head()
        heads = load_medusa(directory, loaded.config, target_sha256=sha256, head=weights)
        count = heads.config.num_heads
        if (num_drafts or 0) > count:
            raise ConfigError(f"{num_drafts} drafts were asked for; {directory} has {count} heads")
        return MedusaStudent(heads.to(target.device), target, objective, num_drafts)
    decoder, tokenizer = load_draft(directory)
    reading = Reading.between(loaded, load_model(directory, kernels="reference"))
    decoder = decoder.to(target.device)
    return DraftModelStudent(decoder, tokenizer, reading, target, num_drafts or 4, objective)
