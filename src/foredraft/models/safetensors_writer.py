"""Safetensors files: written tensor by tensor, so that never more than one is in memory, or whole.

Knows the layout (huggingface/safetensors, README, "Format"); knows no model. The safetensors
library's own writer wants all tensors at once.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save
from torch import Tensor

_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
}
_ALIGNMENT = 8


@dataclass(frozen=True, slots=True)
class Stored:
    """What a tensor is in the file."""

    shape: tuple[int, ...]
    dtype: torch.dtype  # float64, float32, float16 or bfloat16

    @property
    def num_values(self) -> int:
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        return self.num_values * self.dtype.itemsize


def save_tensors(
    path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None
) -> None:
    """Write contiguous tensors that are in memory anyway. Raises OSError.

    `save_file` of the library has errors of its own, and hides its files from everybody else.
    """
    path.write_bytes(save(dict(tensors), None if metadata is None else dict(metadata)))


def write_safetensors(
    path: Path,
    tensors: Mapping[str, Stored],
    read: Callable[[str], Tensor],
    metadata: Mapping[str, str],
    written: Callable[[int], None],
) -> None:
    """Write `read(name)` for each of `tensors`, which says its shape and dtype beforehand.

    `written` is told the bytes of each tensor when it is in the file. Raises OSError.
    """
    # Wide elements first, so that every tensor begins at a multiple of its element's size.
    names = sorted(tensors, key=lambda name: -tensors[name].dtype.itemsize)
    with path.open("wb") as file:
        file.write(_header(names, tensors, metadata))
        for name in names:
            tensor, stored = read(name), tensors[name]
            if (tuple(tensor.shape), tensor.dtype) != (stored.shape, stored.dtype):
                raise ValueError(f"tensor {name} is {tensor.dtype} {list(tensor.shape)}")
            file.write(tensor.contiguous().flatten().view(torch.uint8).numpy().data)
            written(stored.num_bytes)


def _header(names: list[str], tensors: Mapping[str, Stored], metadata: Mapping[str, str]) -> bytes:
    entries: dict[str, object] = {"__metadata__": dict(metadata)}
    end = 0
    for name in names:
        stored, start = tensors[name], end
        end = start + stored.num_bytes
        entries[name] = {
            "dtype": _NAMES[stored.dtype],
            "shape": stored.shape,
            "data_offsets": [start, end],
        }
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    return len(text).to_bytes(8, "little") + text
