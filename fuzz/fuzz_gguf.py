"""Fuzz target of the GGUF reader: the container, its tensors, and the model it describes.

Run: python fuzz/fuzz_gguf.py [-max_total_time=SECONDS] CORPUS
"""

from __future__ import annotations

import sys
from contextlib import suppress

from driver import fuzz, refusal_of, scratch
from instrument import instrument
from mutate import mutate_gguf

from foredraft.core.errors import ModelError
from foredraft.models import fields, gguf, gguf_model, gguf_quants, gguf_tokenizer, untrusted

PATH = scratch() / "model.gguf"


def read(data: bytes) -> None:
    """Reads `data` as a model. Raises what a reader must not: all but a ModelError of one line."""
    if refusal(data):
        return
    file = gguf.GGUFFile(PATH)
    with suppress(ModelError):
        config = gguf_model.config_from_gguf(file)
        weights = gguf_model.weights_from_gguf(file, config)
        for name in weights:
            weights[name]
    with suppress(ModelError):
        gguf_tokenizer.tokenizer_from_gguf(file)


def refusal(data: bytes) -> str | None:
    """What the reader of the container says against `data`."""
    PATH.write_bytes(data)
    return refusal_of(_read_container, PATH)


def _read_container() -> None:
    file = gguf.GGUFFile(PATH)
    for name, place in file.tensors.items():
        assert tuple(file.tensor(name).shape) == place.shape


if __name__ == "__main__":
    instrument(fields, gguf, gguf_model, gguf_quants, gguf_tokenizer, untrusted)
    fuzz(read, mutate_gguf, sys.argv)
