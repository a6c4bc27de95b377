"""From what a user calls a model to one that runs: a built-in name, a directory, a GGUF file.

Knows the order of the steps; each step's details live in its own module.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from foredraft.core.errors import ModelError
from foredraft.kernels.catalog import load_kernels
from foredraft.kernels.interface import Kernels
from foredraft.kernels.quantized import check_quantization
from foredraft.models.config import ModelConfig
from foredraft.models.decoder import Decoder, activation_dtype
from foredraft.models.gguf import GGUFFile
from foredraft.models.gguf_model import config_from_gguf, weights_from_gguf
from foredraft.models.gguf_tokenizer import tokenizer_from_gguf
from foredraft.models.hf_config import WITH_IMAGES, config_from_json, read_json
from foredraft.models.interface import Model
from foredraft.models.registry import BUILT_IN, pull
from foredraft.models.safetensors_weights import SINGLE, SafetensorsWeights, WithoutCopiedHead
from foredraft.models.tokenizer import Tokenizer
from foredraft.models.tokenizer_files import generation_eos_ids, tokenizer_from_directory
from foredraft.models.weights import TextPart

ADAPTER = "adapter_config.json"
DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float64": torch.float64,
}


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model with its tokenizer, and the facts others ask about."""

    model: Model
    tokenizer: Tokenizer
    config: ModelConfig
    name: str  # as the user called it
    path: Path  # the directory or file it came from
    dtype: torch.dtype  # of the weights
    device: torch.device
    weight_bytes: int  # of all weights as kept in memory
    eos_ids: tuple[int, ...]  # tokens that end a generation
    num_threads: int | None  # as asked; None leaves it to the kernels

    @property
    def cache_dtype(self) -> torch.dtype:
        """Of keys and values where nobody asks for another: float32 on a CPU (float64 for a float64
        model), the weights' dtype elsewhere.
        """
        on_cpu = self.device.type == "cpu" and self.dtype != torch.float64
        return torch.float32 if on_cpu else self.dtype


def load_model(
    name_or_path: str | Path,
    *,
    dtype: str = "auto",
    device: torch.device | str = "cpu",
    kernels: str = "auto",
    num_threads: int | None = None,
    quantization: str | None = None,
) -> LoadedModel:
    """Load a built-in name (fetched on first use), a Hugging Face directory or a `.gguf` file.

    Args:
        dtype: of the weights: "float32", "bfloat16", "float64" (reference kernels), or "auto":
            bfloat16 on the native kernels, float32 on the reference kernels.
        device: "cpu", "cuda" or "cuda:N".
        kernels: "auto", "native" or "reference"; see `kernels.catalog.load_kernels`.
        num_threads: of the native kernels; None: every core.
        quantization: "q8_0": linears and embedding in 8 bits; those that a GGUF file has in Q8_0
            as they are. None: in `dtype`.

    Raises:
        ConfigError: for an unknown quantization.
        ModelError: for an unknown name, files that cannot be used, an unknown dtype or kernels
            that cannot serve it.
    """
    check_quantization(quantization)
    path = resolve(name_or_path)
    place = _device(device)
    try:
        config, weights, tokenizer = open_files(path)
    except ModelError as error:
        if str(error).startswith((str(path), "the directory")):
            raise
        raise ModelError(f"{path}: {error}") from error
    chosen, weight_dtype = _choose(dtype, place, kernels, num_threads, config.head_dim)
    if tokenizer.vocab_size > config.vocab_size:
        raise ModelError(
            f"{path}: the tokenizer has {tokenizer.vocab_size} tokens, "
            f"the model {config.vocab_size}"
        )
    try:
        with _one_torch_thread():
            decoder = Decoder(config, weights, chosen, weight_dtype, place, quantization)
    except ModelError as error:
        raise ModelError(f"{path}: {error}") from error
    return LoadedModel(
        model=decoder,
        tokenizer=tokenizer,
        config=config,
        name=str(name_or_path),
        path=path,
        dtype=weight_dtype,
        device=place,
        weight_bytes=decoder.weight_bytes,
        eos_ids=tokenizer.eos_ids,
        num_threads=num_threads,
    )


def resolve(name_or_path: str | Path) -> Path:
    """The file or directory a model's name stands for; a built-in one is fetched if need be.

    Raises ModelError, listing the names, for one that is neither.
    """
    if not isinstance(name_or_path, str | os.PathLike):
        raise ModelError(f"a model must be a name, a path or a loaded model, got {name_or_path!r}")
    if str(name_or_path) in BUILT_IN:
        return pull(str(name_or_path))
    path = expanded(name_or_path)
    try:
        is_directory, is_file = path.is_dir(), path.is_file()
    except OSError as error:  # a name too long, a directory on the way that may not be entered
        raise ModelError(f"model {str(name_or_path)!r}: {error.strerror}") from error
    if (is_directory and str(name_or_path)) or (is_file and path.suffix == ".gguf"):
        return path
    what = "is no .gguf file" if is_file else "does not exist"
    raise ModelError(
        f"model {str(name_or_path)!r} {what}; give a Hugging Face directory, a .gguf file or one "
        f"of the built-in names: {', '.join(sorted(BUILT_IN))}"
    )


def expanded(path: str | os.PathLike[str]) -> Path:
    """`path` with a leading `~` or `~user` replaced. Raises ModelError for a user without home."""
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        raise ModelError(f"{str(path)!r}: no such user, or one without a home directory") from error


def open_files(path: Path) -> tuple[ModelConfig, Mapping[str, Tensor], Tokenizer]:
    """Config, weights by Hugging Face's names, read when asked for, and tokenizer of a model's file
    or directory. Raises ModelError for files that cannot be used.
    """
    if path.is_file():
        file = GGUFFile(path)
        config = config_from_gguf(file)
        tokenizer = tokenizer_from_gguf(file)
        weights: Mapping[str, Tensor] = weights_from_gguf(file, config)
        return replace(config, eos_token_ids=tokenizer.eos_ids), weights, tokenizer
    _check_directory(path)
    source = path / "config.json"
    config = config_from_json(read_json(source), str(source))
    tokenizer = tokenizer_from_directory(path, generation_eos_ids(path, config.eos_token_ids))
    weights = SafetensorsWeights(path)
    if config.architecture in WITH_IMAGES:
        weights = TextPart(weights)
    if config.tie_word_embeddings:
        weights = WithoutCopiedHead(weights)
    return replace(config, eos_token_ids=tokenizer.eos_ids), weights, tokenizer


def _check_directory(path: Path) -> None:
    """Raise ModelError for a directory that is no model, saying what it lacks."""
    if (path / ADAPTER).exists():
        raise ModelError(f"{path}: {ADAPTER}: adapters are refused; merge it into the weights")
    if not (path / "config.json").exists():
        hint = "; give the .gguf file itself as the model" if any(path.glob("*.gguf")) else ""
        raise ModelError(
            f"the directory {path.resolve()} has no config.json; a model's directory holds "
            f"config.json, tokenizer.json and {SINGLE}{hint}"
        )


def _choose(
    dtype: str,
    device: torch.device,
    kernels: str,
    num_threads: int | None,
    head_dim: int,
) -> tuple[Kernels, torch.dtype]:
    """Kernels and weight dtype that fit each other and the model's heads."""
    if not isinstance(dtype, str) or (dtype != "auto" and dtype not in DTYPES):
        raise ModelError(f"unknown dtype {dtype!r}; valid are auto, {', '.join(DTYPES)}")
    wanted = DTYPES.get(dtype, torch.float32)
    try:
        chosen = load_kernels(kernels, device, activation_dtype(wanted), num_threads, head_dim)
    except ValueError as error:
        raise ModelError(str(error)) from error
    if dtype == "auto" and chosen.name == "native":
        wanted = torch.bfloat16
    return chosen, wanted


@contextmanager
def _one_torch_thread() -> Iterator[None]:
    """Loading is thousands of short operations: on a busy machine torch's threads would wait for
    each other at the end of each, which made loading ten times slower.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _device(device: torch.device | str) -> torch.device:
    valid = "valid are cpu, cuda and cuda:N"
    try:
        if not isinstance(device, str | torch.device):
            raise TypeError(f"a device is a name, not a {type(device).__name__}")
        place = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ModelError(f"device {device!r} cannot be used; {valid}") from error
    if place.type not in ("cpu", "cuda"):
        raise ModelError(f"device {str(device)!r} cannot be used; {valid}")
    try:
        torch.empty(0, device=place)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise ModelError(f"device {str(device)!r} cannot be used ({reason}); {valid}") from error
    return place
