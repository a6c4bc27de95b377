"""A model's first layers, with its embedding, final norm and head, as a directory of their own.

Knows which files and tensors such a directory has; knows no kernel. What comes out is a weak but
real draft model for the model it was cut from.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from foredraft.core.errors import ModelError
from foredraft.models.atomic_directory import appearing
from foredraft.models.config import ModelConfig
from foredraft.models.gguf import GGUFFile
from foredraft.models.gguf_model import config_from_gguf, weights_from_gguf
from foredraft.models.gguf_tokenizer import _NAMED_TOKENS, tokenizer_from_gguf
from foredraft.models.hf_config import config_from_json, read_json
from foredraft.models.hf_writer import (
    config_to_json,
    differing_fields,
    write_json,
    write_tokenizer,
)
from foredraft.models.load import ADAPTER, expanded, resolve
from foredraft.models.registry import BUILT_IN, licence_path
from foredraft.models.safetensors_weights import SINGLE, SafetensorsWeights, WithoutCopiedHead
from foredraft.models.safetensors_writer import Stored, write_safetensors
from foredraft.models.tokenizer_files import generation_eos_ids, tokenizer_from_directory
from foredraft.models.weights import Reader, expected_shapes

STORED_DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
_CONFIG, _GENERATION = "config.json", "generation_config.json"
_BESIDE = re.compile(  # what lies beside config and weights and goes with them
    r"tokenizer\.json|tokenizer_config\.json|chat_template\.jinja|special_tokens_map\.json"
    r"|added_tokens\.json|vocab\.json|merges\.txt|tokenizer\.model|generation_config\.json"
    r"|(?i:licen[cs]e|notice|use_policy|gemma_terms)([-_.].*)?"
)
_MARK = "foredraft_export"  # in the weights' metadata: the directory is one of ours

Progress = Callable[[int, int], None]  # (bytes written, bytes in all), of the tensors


@dataclass(frozen=True, slots=True)
class Exported:
    """What was written."""

    directory: Path
    num_layers: int
    source_layers: int  # of the model they come from
    num_parameters: int
    num_bytes: int  # of all files


def export_layers(
    name_or_path: str | Path,
    directory: str | Path,
    num_layers: int,
    *,
    dtype: str = "auto",
    force: bool = False,
    progress: Progress | None = None,
) -> Exported:
    """Write the first `num_layers` layers of a model as a Hugging Face directory of its own.

    The tensors of a directory are copied as they are. Those of a GGUF file are widened: matrices to
    `dtype`; norms and biases, which are kept wide in memory too, to float32. Loaded in the dtype
    they are stored in, or a narrower one, the layers are those of the model, bit for bit. The
    directory appears when it is complete, or not at all.

    Args:
        name_or_path: as for `load_model`.
        dtype: "bfloat16", "float32", or "auto": as they are, bfloat16 for those of a GGUF file.
        force: replace an earlier export; nothing else is ever replaced.

    Raises:
        ModelError: for a model that cannot be used or written, more layers than it has, a directory
            that is not free or cannot be written.
    """
    if dtype != "auto" and dtype not in STORED_DTYPES:
        raise ModelError(f"unknown dtype {dtype!r}; valid are auto, {', '.join(STORED_DTYPES)}")
    target = _absolute(directory)
    check_destination(target, force)
    path = resolve(name_or_path)
    if target == path.resolve():
        raise ModelError(f"{target} is the model itself, which the export would replace")
    with _naming(path):
        source = _open(path)
    count = source.config.num_layers
    if not 1 <= num_layers <= count:
        raise ModelError(
            f"{name_or_path} has {count} layers; expected 1 to {count}, got {num_layers}"
        )
    try:
        with _naming(path), appearing(target, lambda: check_destination(target, force)) as made:
            mark = f"layers 1 to {num_layers} of {path.name}"
            tensors = _write(source, made, num_layers, STORED_DTYPES.get(dtype), mark, progress)
            _copy_licence(name_or_path, made)
            num_bytes = sum(file.stat().st_size for file in made.iterdir())
    except OSError as error:
        raise ModelError(f"cannot write {target}: {error.strerror}") from error
    num_parameters = sum(tensor.num_values for tensor in tensors.values())
    return Exported(target, num_layers, count, num_parameters, num_bytes)


def _absolute(directory: str | Path) -> Path:
    try:
        return expanded(directory).resolve()
    except (OSError, RuntimeError) as error:  # of a loop of links, which has no `strerror` then
        raise ModelError(f"cannot write {directory}: {error}") from error


def check_destination(directory: Path, force: bool) -> None:
    """Raise ModelError unless `directory` is missing or empty or, with `force`, an export of ours.

    That is one whose weights say so and which holds nothing that no export writes.
    """
    try:
        names = sorted(entry.name for entry in directory.iterdir())
    except FileNotFoundError:
        return
    except OSError as error:
        raise ModelError(f"cannot write {directory}: {error.strerror}") from error
    if not names:
        return
    if not force:
        raise ModelError(f"{directory} is not empty; --force replaces an earlier export")
    ours = (_CONFIG, SINGLE)
    strange = next((name for name in names if name not in ours and not _goes_along(name)), None)
    if strange is not None or not _is_marked(directory / SINGLE):
        why = f"it holds {strange}" if strange else f"its {SINGLE}, if any, is not of one"
        raise ModelError(f"{directory} is no earlier export and stays as it is: {why}")


def _goes_along(file: str) -> bool:
    return _BESIDE.fullmatch(file) is not None


def _is_marked(weights: Path) -> bool:
    try:
        with safe_open(weights, framework="pt") as file:
            return _MARK in (file.metadata() or {})
    except (SafetensorError, OSError):
        return False


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Errors that say nothing of the file they are about begin with it."""
    try:
        yield
    except ModelError as error:
        if str(error).startswith(str(path)):
            raise
        raise ModelError(f"{path}: {error}") from error


class _Source(Protocol):
    """A model's files, opened and checked; tensors are read when asked for."""

    @property
    def config(self) -> ModelConfig: ...

    @property
    def weights(self) -> Mapping[str, Tensor]:
        """By Hugging Face's names."""

    @property
    def dtype(self) -> torch.dtype | None:
        """To store matrices in where nobody chose; None: as each is."""

    def config_values(self, config: ModelConfig) -> dict[str, Any]:
        """config.json for the source's config with fewer layers."""

    def write_beside(self, directory: Path) -> None:
        """Write what goes with config and weights: the tokenizer, which ids end a generation."""


def _open(path: Path) -> _Source:
    if path.is_file():
        return _GGUFSource(GGUFFile(path))
    if (path / ADAPTER).exists():
        raise ModelError(f"{path}: {ADAPTER}: adapters are refused; merge it into the weights")
    return _DirectorySource(path)


def _write(
    source: _Source,
    directory: Path,
    num_layers: int,
    dtype: torch.dtype | None,
    mark: str,
    progress: Progress | None,
) -> dict[str, Stored]:
    """All files of the export; returns what each tensor is."""
    windows = source.config.windows[:num_layers]
    config = replace(source.config, num_layers=num_layers, windows=windows if any(windows) else ())
    dtype = dtype or source.dtype
    values = source.config_values(config)
    if dtype is not None:
        values["dtype" if "dtype" in values else "torch_dtype"] = str(dtype).removeprefix("torch.")
    write_json(directory / _CONFIG, values)
    source.write_beside(directory)
    reader = Reader(source.config, source.weights, torch.float32, torch.device("cpu"))
    tensors = {
        name: _stored(reader, source.weights, name, shape, dtype)
        for name, shape in expected_shapes(config).items()
    }
    total, done = sum(tensor.num_bytes for tensor in tensors.values()), 0

    def written(num_bytes: int) -> None:
        nonlocal done
        done += num_bytes
        if progress is not None:
            progress(done, total)

    def read(name: str) -> Tensor:
        return reader.tensor(name, tensors[name].dtype)

    metadata = {"format": "pt", _MARK: mark}
    write_safetensors(directory / SINGLE, tensors, read, metadata, written)
    return tensors


def _stored(
    reader: Reader,
    weights: Mapping[str, Tensor],
    name: str,
    shape: tuple[int, ...],
    dtype: torch.dtype | None,
) -> Stored:
    if dtype is None:  # the tensor is checked, mapped into memory but not read
        return Stored(shape, reader.tensor(name, weights[name].dtype).dtype)
    return Stored(shape, dtype if len(shape) > 1 else torch.float32)


def _copy_licence(name_or_path: str | Path, directory: Path) -> None:
    """A built-in model's licence, which lies beside its file; a directory's own goes along."""
    licence = licence_path(str(name_or_path)) if str(name_or_path) in BUILT_IN else None
    if licence is not None and licence.is_file():
        shutil.copyfile(licence, directory / licence.name)


class _DirectorySource:
    """A Hugging Face directory: its files are copied, its config.json shortened."""

    dtype: torch.dtype | None = None

    def __init__(self, path: Path) -> None:
        self._path = path
        self._values = read_json(path / _CONFIG)
        self.config = config_from_json(self._values, str(path / _CONFIG))
        # Refused here rather than when the export is loaded.
        tokenizer_from_directory(path, generation_eos_ids(path, self.config.eos_token_ids))
        weights: Mapping[str, Tensor] = SafetensorsWeights(path)
        if self.config.tie_word_embeddings:
            weights = WithoutCopiedHead(weights)
        self.weights = weights

    def config_values(self, config: ModelConfig) -> dict[str, Any]:
        source, count = str(self._path / _CONFIG), config.num_layers
        values = self._values | {"num_hidden_layers": count}
        if values.get("layer_types") is not None:  # the only list with an entry for each layer
            values["layer_types"] = values["layer_types"][:count]
        changed = differing_fields(config, config_from_json(values, source))
        if changed:
            raise ModelError(f"{source}: cut to {count} layers, {', '.join(changed)} would change")
        return values

    def write_beside(self, directory: Path) -> None:
        for file in self._path.iterdir():
            if _goes_along(file.name) and file.is_file():
                shutil.copyfile(file, directory / file.name)


class _GGUFSource:
    """A GGUF file: its config and tokenizer are written in Hugging Face's form."""

    dtype: torch.dtype | None = torch.bfloat16

    def __init__(self, file: GGUFFile) -> None:
        self._file = file
        self._tokenizer = tokenizer_from_gguf(file)
        self.config = replace(config_from_gguf(file), eos_token_ids=self._tokenizer.eos_ids)
        self.weights: Mapping[str, Tensor] = weights_from_gguf(file, self.config)

    def config_values(self, config: ModelConfig) -> dict[str, Any]:
        return config_to_json(config)

    def write_beside(self, directory: Path) -> None:
        ids = {
            "bos_token_id": self.config.bos_token_id,
            "eos_token_id": list(self.config.eos_token_ids),
        }
        write_json(directory / _GENERATION, ids)
        tokens = self._file.metadata["tokenizer.ggml.tokens"]
        named = {
            name: tokens[self._file.metadata[f"tokenizer.ggml.{key}"]]
            for name, key in _NAMED_TOKENS.items()
            if f"tokenizer.ggml.{key}" in self._file.metadata
        }
        write_tokenizer(directory, self._tokenizer, named, self.config.max_position_embeddings)
