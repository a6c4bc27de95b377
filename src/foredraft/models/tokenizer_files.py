"""A tokenizer from a Hugging Face directory: tokenizer.json and what lies beside it.

Knows the files and their keys; knows no model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Backend

from foredraft.core.errors import ModelError
from foredraft.models.fields import Fields
from foredraft.models.hf_config import read_json
from foredraft.models.tokenizer import Tokenizer
from foredraft.models.tokenizer_json import read_tokenizer_json
from foredraft.models.turn_ends import generation_ends
from foredraft.models.untrusted import read_text

TEMPLATE_FILE = "chat_template.jinja"
MAX_TEMPLATE_BYTES = 4 * 2**20
_NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token")


def tokenizer_from_directory(directory: Path, eos_ids: Sequence[int]) -> Tokenizer:
    """The tokenizer of `directory`; `eos_ids` are those its configs name.

    Raises ModelError where tokenizer.json is missing or damaged.
    """
    path = directory / "tokenizer.json"
    if not path.exists():
        raise ModelError(f"{directory}: no tokenizer.json (other tokenizer files are not read)")
    text = read_tokenizer_json(path)
    try:
        backend = Backend.from_str(text)
    except Exception as error:  # the library raises plain Exception for a damaged file
        raise ModelError(f"{path}: not a valid tokenizer ({error})") from error
    settings = directory / "tokenizer_config.json"
    values = read_json(settings) if settings.exists() else {}
    named = _named_tokens(values)
    template = _template(directory, values)
    ends = list(eos_ids)
    if not ends and "eos_token" in named:
        token = backend.token_to_id(named["eos_token"])
        ends = [] if token is None else [token]
    return Tokenizer(
        backend,
        chat_template=template,
        special_tokens=named,
        eos_ids=generation_ends(backend, ends, template),
        add_bos=_add_bos(values, backend),
    )


def generation_eos_ids(directory: Path, config_ids: Sequence[int]) -> tuple[int, ...]:
    """The EOS ids of generation_config.json, else those of config.json."""
    path = directory / "generation_config.json"
    if path.exists():
        ids = Fields(read_json(path), str(path)).ids("eos_token_id")
        if ids:
            return ids
    return tuple(config_ids)


def _named_tokens(values: Mapping[str, Any]) -> dict[str, str]:
    """A named token is a string or an object with its `content`."""
    named = {}
    for name in _NAMED_TOKENS:
        value = values.get(name)
        content = value.get("content") if isinstance(value, dict) else value
        if isinstance(content, str):
            named[name] = content
    return named


def _template(directory: Path, values: Mapping[str, Any]) -> str | None:
    path = directory / TEMPLATE_FILE
    if path.exists():
        return read_text(path, MAX_TEMPLATE_BYTES)
    template = values.get("chat_template")
    if isinstance(template, list):  # several by name
        named = [t for t in template if isinstance(t, dict) and t.get("name") == "default"]
        template = named[0].get("template") if named else None
    if template is not None and not isinstance(template, str):
        raise ModelError(f"{directory}: chat_template in tokenizer_config.json is no string")
    return template


def _add_bos(values: Mapping[str, Any], backend: Backend) -> bool | None:
    """Without a post-processor to say so, `add_bos_token` decides."""
    flag = values.get("add_bos_token")
    return flag if isinstance(flag, bool) and backend.post_processor is None else None
