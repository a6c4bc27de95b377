"""A Hugging Face directory's safetensors, one file or many, as a lazy mapping of names to tensors.

Knows files and their index; knows no model.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from foredraft.core.errors import ModelError
from foredraft.models.hf_config import read_json
from foredraft.models.safetensors_header import check_header
from foredraft.models.untrusted import is_name, quoted

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
# Recomputed from the config; old checkpoints store them beside the weights.
_DERIVED = ("rotary_emb.inv_freq",)


class SafetensorsWeights(Mapping[str, Tensor]):
    """The tensors of `directory`, each read from the (memory-mapped) file when asked for.

    Raises ModelError for a file that is missing, damaged or disagrees with the index.
    """

    def __init__(self, directory: Path) -> None:
        self._files: dict[str, Any] = {}
        self._owner: dict[str, str] = {}
        index = directory / INDEX
        if index.exists():
            self._read_index(directory, index)
        elif (directory / SINGLE).exists():
            self._open(directory, SINGLE)
        else:
            raise ModelError(f"{directory}: no {SINGLE} and no {INDEX}{_other_weights(directory)}")

    def _read_index(self, directory: Path, index: Path) -> None:
        table = read_json(index).get("weight_map")
        if not isinstance(table, dict) or not all(isinstance(f, str) for f in table.values()):
            raise ModelError(f"{index}: weight_map is not an object of file names")
        for name in table:
            if not is_name(name):
                raise ModelError(f"{index}: weight_map names a tensor {quoted(name)}")
        for file in sorted(set(table.values())):
            if not is_name(file) or Path(file).name != file or file == "..":
                raise ModelError(f"{index}: {quoted(file)} is not a plain file name")
            if not _exists(directory / file):
                raise ModelError(f"{index}: {file} is missing from the directory")
            self._open(directory, file)
        unlisted = sorted(self._owner.keys() - table.keys())
        if unlisted:
            more = f" and {len(unlisted) - 3} more" if len(unlisted) > 3 else ""
            raise ModelError(
                f"{index}: weight_map does not list {', '.join(unlisted[:3])}{more}, "
                f"found in {self._owner[unlisted[0]]}"
            )
        for name in sorted(table):
            if self._owner.get(name, table[name]) != table[name] or (
                name not in self._owner and not name.endswith(_DERIVED)
            ):
                raise ModelError(f"{index}: tensor {name} is not in {table[name]}")

    def _open(self, directory: Path, file: str) -> None:
        check_header(directory / file)
        try:
            handle: Any = safe_open(directory / file, framework="pt")
            names = list(handle.keys())
        except (SafetensorError, OSError) as error:
            raise ModelError(
                f"{directory / file}: not readable as safetensors ({error})"
            ) from error
        self._files[file] = handle
        for name in names:
            if name.endswith(_DERIVED):
                continue
            if name in self._owner:
                raise ModelError(
                    f"{directory}: tensor {name} is in {self._owner[name]} and in {file}"
                )
            self._owner[name] = file

    def __getitem__(self, name: str) -> Tensor:
        try:
            tensor: Tensor = self._files[self._owner[name]].get_tensor(name)
        except SafetensorError as error:
            raise ModelError(f"tensor {name} cannot be read ({error})") from error
        # The format lets a tensor begin at any byte; kernels do not.
        return tensor.clone() if tensor.data_ptr() % tensor.element_size() else tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._owner)

    def __len__(self) -> int:
        return len(self._owner)


class WithoutCopiedHead(Mapping[str, Tensor]):
    """`weights` of a model with tied embeddings, without the second copy some files hold of them.

    Raises ModelError where that copy is not equal to the embedding.
    """

    def __init__(self, weights: Mapping[str, Tensor]) -> None:
        self._weights = weights
        head, embedding = "lm_head.weight", "model.embed_tokens.weight"
        if head in weights and embedding in weights and not _equal(weights, head, embedding):
            raise ModelError(f"tie_word_embeddings is true, but {head} differs from the embedding")
        self._names = [name for name in weights if name != head]

    def __getitem__(self, name: str) -> Tensor:
        return self._weights[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:  # a name that no file can have
        return False


def _equal(weights: Mapping[str, Tensor], name: str, other: str) -> bool:
    left, right = weights[name], weights[other]
    return left.dtype == right.dtype and left.equal(right)


def _other_weights(directory: Path) -> str:
    if any(directory.glob("*.bin")) or any(directory.glob("*.pth")):
        return "; pickled weights (.bin, .pth) are not read: convert them to safetensors"
    if any(directory.glob("*.gguf")):
        return "; give the .gguf file itself as the model"
    return ""
