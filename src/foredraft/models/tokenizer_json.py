"""A tokenizer.json, checked before the tokenizers library believes it.

Knows what in such a file would make the library fail, or do far more than the file is long; knows
no model. The library panics, or ends the process, on some of it: that no caller could catch.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from foredraft.core.errors import ModelError
from foredraft.models.untrusted import quoted, read_text, unique_keys

MAX_BYTES = 128 * 2**20  # the largest in use have a quarter of it
MAX_TOKEN = 512  # characters of an added token; work grows with their square and more
MAX_INSERTED = 32  # characters that the normalizers, or the decoders, put into a text in all
MAX_PIECES = 16  # of a template around a text
_NEEDS_UNKNOWN = ("WordLevel", "WordPiece")


def read_tokenizer_json(path: Path) -> str:
    """The text of a tokenizer.json that the library can be given.

    Raises ModelError, naming the file and what is wrong, for one that it can't.
    """
    text = read_text(path, MAX_BYTES)
    try:
        values = json.loads(text, object_pairs_hook=unique_keys)
        if not isinstance(values, dict):
            raise ValueError(f"it is {quoted(values)}, expected a JSON object")
        model = _object(values.get("model"))
        added = [token for token in _list(values.get("added_tokens")) if isinstance(token, dict)]
        _check_added(added)
        for part in ("normalizer", "decoder"):
            _check_inserted(part, values.get(part))
        _check_unknown(model, added)
        _check_template(values.get("post_processor"), _known_ids(model, added))
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path}: not a valid tokenizer ({error})") from error
    return text


def _check_added(tokens: Sequence[Mapping[str, Any]]) -> None:
    for token in tokens:
        content = token.get("content")
        if isinstance(content, str) and not 1 <= len(content) <= MAX_TOKEN:
            raise ValueError(
                f"added token {quoted(content)} has {len(content)} characters, "
                f"expected 1 to {MAX_TOKEN}"
            )


def _check_inserted(part: str, values: Any) -> None:
    """What a normalizer or decoder puts into a text; the library trusts the sizes that a character
    map claims.
    """
    inserted = 0
    for item in _objects(values):
        if "precompiled_charsmap" in item:
            raise ValueError(f"{part}: Precompiled is not supported")
        pattern = item.get("pattern")
        if pattern == "" or "" in _values(pattern):
            raise ValueError(f"{part}: an empty pattern is everywhere")
        texts = (item.get(key) for key in ("content", "prepend"))
        inserted += sum(len(text) for text in texts if isinstance(text, str))
    if inserted > MAX_INSERTED:
        raise ValueError(f"{part}: puts in {inserted} characters, at most {MAX_INSERTED} fit")


def _check_unknown(model: Mapping[str, Any], added: Sequence[Mapping[str, Any]]) -> None:
    """The token for what is not in the vocabulary is itself there."""
    kind, unknown = model.get("type"), model.get("unk_token")
    tokens = [*_object(model.get("vocab")), *(token.get("content") for token in added)]
    if (unknown or kind in _NEEDS_UNKNOWN) and unknown not in tokens:
        raise ValueError(f"model: unk_token {quoted(unknown)} is not in the vocabulary")
    if kind == "Unigram" and model.get("unk_id") is None:
        raise ValueError("model: unk_id is missing")


def _check_template(values: Any, known: frozenset[int]) -> None:
    """What is put before and behind a text are tokens that exist."""
    for item in _objects(values):
        named: set[str] = set()
        for key in ("single", "pair"):
            pieces = item.get(key)
            if isinstance(pieces, list) and len(pieces) > MAX_PIECES:
                raise ValueError(
                    f"post_processor: {key} has {len(pieces)} pieces, at most {MAX_PIECES} fit"
                )
            named |= {str(_object(o.get("SpecialToken")).get("id")) for o in _objects(pieces)}
        missing = named - {"None"} - _object(item.get("special_tokens")).keys()
        if missing:
            raise ValueError(f"post_processor: token {quoted(min(missing))} is not described")
        ids = [*_list(item.get("ids")), *_list(item.get("sep"))[1:], *_list(item.get("cls"))[1:]]
        for one in ids:
            if not isinstance(one, int) or one not in known:
                raise ValueError(f"post_processor: token id {quoted(one)} is not in the vocabulary")


def _known_ids(model: Mapping[str, Any], added: Sequence[Mapping[str, Any]]) -> frozenset[int]:
    vocab = model.get("vocab")
    ids = [*_values(vocab), *range(len(_list(vocab))), *(token.get("id") for token in added)]
    return frozenset(one for one in ids if isinstance(one, int))


def _object(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _values(value: Any) -> list[Any]:
    return list(_object(value).values())


def _objects(values: Any) -> Iterator[Mapping[str, Any]]:
    """Every JSON object in `values`, itself included, at any depth."""
    pending = [values]
    while pending:
        value = pending.pop()
        if isinstance(value, dict):
            yield value
            pending += value.values()
        elif isinstance(value, list):
            pending += value
