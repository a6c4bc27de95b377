"""The fuzz targets run, find nothing in a short while, and would find a reader's fault."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest

from foredraft.models import gguf, safetensors_header

FUZZ = Path(__file__).parents[3] / "fuzz"
NUM_INPUTS = 600


@pytest.fixture
def fuzz(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Imports a module of the folder as its own programs do."""
    monkeypatch.syspath_prepend(str(FUZZ))
    return importlib.import_module


def findings(fuzz: Any, kind: str) -> list[str]:
    """What the first inputs of the driver without coverage bring out of a target."""
    corpus = fuzz("make_corpus")
    seeds = list(getattr(corpus, f"{kind}_seeds")().values())
    mutate = getattr(fuzz("mutate"), f"mutate_{kind}")
    target, random_input = fuzz(f"fuzz_{kind}").read, fuzz("driver").random_input
    found = []
    for number in range(NUM_INPUTS):
        try:
            target(random_input(seeds, mutate, number))
        except Exception as error:
            found.append(f"input {number}: {error!r}")
    return found


@pytest.mark.parametrize("kind", ["gguf", "safetensors"])
def test_every_seed_is_read(fuzz: Any, kind: str) -> None:
    target = fuzz(f"fuzz_{kind}")
    for name, seed in getattr(fuzz("make_corpus"), f"{kind}_seeds")().items():
        target.read(seed)
        assert target.refusal(seed) is None, name


@pytest.mark.parametrize("kind", ["gguf", "safetensors"])
def test_mutated_seeds_bring_out_refusals_only(fuzz: Any, kind: str) -> None:
    assert findings(fuzz, kind) == []


def test_a_gguf_reader_that_trusts_lengths_is_found_out(
    fuzz: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gguf._Cursor, "need", lambda *_: None)
    assert findings(fuzz, "gguf")


def test_a_safetensors_reader_that_trusts_types_is_found_out(
    fuzz: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(safetensors_header, "_integers", lambda _, entry, key: entry[key])
    assert findings(fuzz, "safetensors")


def test_mutation_knows_the_numbers_of_a_header(fuzz: Any) -> None:
    raw = fuzz("make_corpus").gguf_seeds()["two-tensors"]
    read = [
        int.from_bytes(raw[at : at + size], "little")
        for at, size in fuzz("mutate").gguf_numbers(raw)
    ]
    version, tensors, entries = 3, 2, 1
    entry = [1, 0, 1]  # the length of "k", its type, its value
    first, second = [1, 1, 8, 0, 0], [1, 2, 4, 2, 1, 32]  # name, dimensions, sizes, type, offset
    assert read == [version, tensors, entries, *entry, *first, *second]
