"""`foredraft pull`: fetch a built-in model before it is needed.

Knows how to say it; `models.registry` fetches.
"""

from __future__ import annotations

import json
import sys
from typing import Annotated

from typer import Argument

from foredraft.cli.options import JsonFlag


def pull(
    model: Annotated[str, Argument(metavar="MODEL", help="A built-in name, such as smollm2-135m.")],
    json_output: JsonFlag = False,
) -> None:
    """Fetch a built-in model once, checked, into the cache directory; prints where it is."""
    from foredraft.cli.download import fetch
    from foredraft.models.registry import built_in, licence_path

    entry = built_in(model)
    path = fetch(model)
    terms = licence_path(model)
    if json_output:
        facts = {
            "model": model,
            "path": str(path),
            "bytes": entry.file.num_bytes,
            "sha256": entry.file.sha256,
            "licence": entry.licence.name,
            "licence_path": None if terms is None else str(terms),
        }
        sys.stdout.write(json.dumps(facts) + "\n")
    else:
        sys.stdout.write(f"{path}\n")
