"""Fuzz target of the safetensors reader: its header and its tensors.

Run: python fuzz/fuzz_safetensors.py [-max_total_time=SECONDS] CORPUS
"""

from __future__ import annotations

import sys

from driver import fuzz, refusal_of, scratch
from instrument import instrument
from mutate import mutate_safetensors

from foredraft.models import safetensors_header, safetensors_weights, untrusted

DIRECTORY = scratch()


def read(data: bytes) -> None:
    """Reads `data` as a model's only file. Raises what a reader must not."""
    if refusal(data):
        return
    # What the check of the header lets through, the library reads.
    weights = safetensors_weights.SafetensorsWeights(DIRECTORY)
    for name in weights:
        assert weights[name].numel() >= 1


def refusal(data: bytes) -> str | None:
    """What the reader says against `data`."""
    (DIRECTORY / safetensors_weights.SINGLE).write_bytes(data)
    return refusal_of(lambda: safetensors_weights.SafetensorsWeights(DIRECTORY), DIRECTORY)


if __name__ == "__main__":
    instrument(safetensors_header, safetensors_weights, untrusted)
    fuzz(read, mutate_safetensors, sys.argv)
