"""A tiny target on disk, and its greedy answers to some prompts, made once."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from foredraft import LLM
from foredraft.models.fingerprint import fingerprint
from foredraft.models.load import LoadedModel, load_model
from foredraft.testing.models import write_tiny_checkpoint
from foredraft.training.acceptance import Measuring
from foredraft.training.answers import Answers, Manifest
from foredraft.training.generate import digest, generate_answers
from foredraft.training.target import Target

WORDS = ["hello", "how", "are", "you", "my", "friend", "today", "in", "town"]
HELD_OUT = 0.15
MAX_TOKENS = 40


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """Of products this small, threads make nothing faster."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def target_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("target")
    return write_tiny_checkpoint(directory, seed=5, num_layers=4, sharpness=3.0)


@pytest.fixture(scope="session")
def loaded(target_directory: Path) -> LoadedModel:
    return load_model(target_directory, dtype="float32", kernels="reference")


@pytest.fixture(scope="session")
def answers_directory(tmp_path_factory: pytest.TempPathFactory, loaded: LoadedModel) -> Path:
    directory = tmp_path_factory.mktemp("answers")
    prompts = [f"{word} {letter}" for word in WORDS for letter in "abcdefg"]
    manifest = Manifest(
        target=str(loaded.path),
        target_sha256=fingerprint(loaded.path),
        dtype="float32",
        vocab_size=loaded.config.vocab_size,
        template_sha256=digest([]),
        prompts_sha256=digest(prompts),
        num_prompts=len(prompts),
        own_prompts=0,
        temperatures=(0.0,),
        max_tokens=MAX_TOKENS,
        seed=0,
        shard_size=32,
        versions={},
    )
    generate_answers(LLM(loaded, speculative_config=None), prompts, directory, manifest)
    return directory


@pytest.fixture(scope="session")
def answers(answers_directory: Path) -> tuple[Answers, Answers]:
    """To train on, and held out."""
    return Answers.open(answers_directory).split(HELD_OUT)


@pytest.fixture(scope="session")
def target(loaded: LoadedModel) -> Target:
    return Target(loaded)


@pytest.fixture
def measuring(loaded: LoadedModel) -> Measuring:
    return Measuring(256, 512, loaded.device, loaded.eos_ids)
