"""A head's directory, strictly: tensors that are missing, unknown or of the wrong shape are errors
that name them.

Knows names, shapes and the safetensors format; knows no head.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from foredraft.core.errors import ModelError
from foredraft.models.atomic_directory import appearing
from foredraft.models.hf_config import read_json
from foredraft.models.hf_writer import write_json
from foredraft.models.load import expanded
from foredraft.models.safetensors_weights import SINGLE, SafetensorsWeights
from foredraft.models.safetensors_writer import save_tensors
from foredraft.models.weights import FLOAT_DTYPES

CONFIG = "config.json"
OWN = "foredraft"  # the key of a config.json under which our own facts lie
_SHOWN = 3  # names in an error


def head_directory(path: str | Path) -> Path:
    """The directory that a head's checkpoint lies in. Raises ModelError where it is none."""
    directory = expanded(path)
    if not directory.is_dir():
        raise ModelError(f"{str(path)!r} is no directory; a head's holds {CONFIG} and {SINGLE}")
    if not (directory / CONFIG).exists():
        raise ModelError(f"{directory}: no {CONFIG}; a head's directory holds it and {SINGLE}")
    return directory


@dataclass(frozen=True, slots=True)
class HeadFiles:
    """What lies in a head's directory, as it is stored."""

    directory: Path
    values: Mapping[str, Any]  # of config.json
    tensors: Mapping[str, Tensor]

    @classmethod
    def open(cls, path: str | Path) -> HeadFiles:
        """Raises ModelError where there is no head, and for files that can't be read."""
        directory = head_directory(path)
        tensors = dict(SafetensorsWeights(directory).items())
        return cls(directory, read_json(directory / CONFIG), tensors)

    @property
    def source(self) -> str:
        """As errors name it."""
        return str(self.directory)

    @property
    def config_source(self) -> str:
        """... and its config.json."""
        return str(self.directory / CONFIG)

    @contextmanager
    def named(self) -> Iterator[None]:
        """A ModelError from within names the directory, where it didn't."""
        try:
            yield
        except ModelError as error:
            if str(error).startswith(self.source):
                raise
            raise ModelError(f"{self.source}: {error}") from None


def fill(module: nn.Module, tensors: Mapping[str, Tensor], source: str) -> None:
    """Copy `tensors` into the parameters of `module` by name, whatever float type they are stored
    in. Raises ModelError unless they are exactly its parameters.
    """
    parameters = dict(module.named_parameters())
    check_tensors({name: each.shape for name, each in parameters.items()}, tensors, source)
    for name, parameter in parameters.items():
        parameter.data.copy_(tensors[name])


def check_tensors(
    shapes: Mapping[str, Sequence[int]], tensors: Mapping[str, Tensor], source: str
) -> None:
    """Raises ModelError unless `tensors` are exactly those of `shapes`, of finite floats."""
    check_names(shapes.keys(), tensors.keys(), source)
    for name, shape in shapes.items():
        tensor = tensors[name]
        if tuple(tensor.shape) != tuple(shape) or tensor.dtype not in FLOAT_DTYPES:
            raise ModelError(
                f"{source}: tensor {name} is {_words(tensor)}, expected floats {list(shape)}"
            )
        if not bool(torch.isfinite(tensor).all()):
            raise ModelError(f"{source}: tensor {name} holds what is no finite number")


def check_names(expected: Any, given: Any, source: str) -> None:
    """Raises ModelError that names the first missing or unknown tensors."""
    for what, names in (("missing", expected - given), ("unknown", given - expected)):
        if names:
            listed = sorted(names)
            more = f" and {len(listed) - _SHOWN} more" if len(listed) > _SHOWN else ""
            raise ModelError(f"{source}: {what} tensor {', '.join(listed[:_SHOWN])}{more}")


def integers(tensor: Tensor, name: str, shape: tuple[int, ...], source: str) -> Tensor:
    """`tensor` as int64. Raises ModelError for another shape or for no integers."""
    whole = not (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool)
    if not whole or tuple(tensor.shape) != shape:
        raise ModelError(
            f"{source}: tensor {name} is {_words(tensor)}, expected integers {list(shape)}"
        )
    return tensor.to(torch.int64)


def write_head(
    directory: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor], dtype: torch.dtype
) -> None:
    """A directory that appears whole, in place of one that holds a head: config.json, and all
    `tensors` in one file, floats in `dtype`.

    Raises ModelError where something else is at `directory`, OSError where it can't be written.
    """

    def check_free() -> None:
        if directory.exists() and (not directory.is_dir() or _strangers(directory)):
            raise ModelError(f"{directory} exists and is no head's directory")

    check_free()
    stored = {
        name: (each.detach().to("cpu", dtype if each.is_floating_point() else None)).contiguous()
        for name, each in tensors.items()
    }
    with appearing(directory, check_free) as made:
        write_json(made / CONFIG, config)
        save_tensors(made / SINGLE, stored, {"format": "pt"})


def _strangers(directory: Path) -> list[str]:
    return [each.name for each in directory.iterdir() if each.name not in (CONFIG, SINGLE)]


def _words(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
