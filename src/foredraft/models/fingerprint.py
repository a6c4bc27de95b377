"""Which model this is: a checksum of the files that its weights come from.

Knows files; knows no format and no tensor.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

from foredraft.core.errors import ModelError

_WEIGHTS = ("*.safetensors", "config.json")
_CHUNK = 2**20


def fingerprint(path: Path) -> str:
    """sha256, in hex, of a model file, or of a directory's weights and config by name and content.

    The same files give the same, wherever they lie. Raises ModelError where nothing can be read.
    """
    whole = path.is_file()
    files = [path] if whole else sorted(file for kind in _WEIGHTS for file in path.glob(kind))
    if not files:
        raise ModelError(f"no model files in {str(path)!r}: expected {' and '.join(_WEIGHTS)}")
    digest = hashlib.sha256()
    try:
        for file in files:
            if not whole:
                digest.update(f"{file.name} {file.stat().st_size}\n".encode())
            with file.open("rb") as stream:
                while chunk := stream.read(_CHUNK):
                    digest.update(chunk)
    except OSError as error:
        raise ModelError(f"cannot read {str(path)!r}: {error.strerror}") from None
    return digest.hexdigest()
