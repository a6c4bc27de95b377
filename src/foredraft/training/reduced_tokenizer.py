"""A tokenizer that knows a part of another's tokens: the reduced vocabulary of a draft model.

Knows the JSON of the tokenizers library; knows no model. What is left out is spelled in the smaller
tokens that are kept. Draft models with such a tokenizer are loaded with "draft_vocabulary":
"shared", here and wherever vocabularies may differ.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from tokenizers import Tokenizer as Backend

from foredraft.core.errors import ModelError
from foredraft.models.tokenizer import Tokenizer

_BYTES = 256


def needed_ids(tokenizer: Tokenizer) -> frozenset[int]:
    """What a reduced vocabulary can't do without: control and added tokens, the unknown token, and
    where texts are spelled in bytes, those.
    """
    state = json.loads(tokenizer._backend.to_str())
    vocabulary, model = tokenizer.vocabulary, state["model"]
    needed = {vocabulary[token["content"]] for token in state["added_tokens"]}
    if model.get("unk_token") is not None:
        needed.add(vocabulary[model["unk_token"]])
    if tokenizer.is_byte_level:
        needed |= {token for text, token in vocabulary.items() if len(text) == 1}
    elif model.get("byte_fallback"):
        needed |= {vocabulary[f"<0x{byte:02X}>"] for byte in range(_BYTES)}
    return frozenset(needed)


def reduced_tokenizer(tokenizer: Tokenizer, ids: Sequence[int]) -> Tokenizer:
    """The tokenizer that knows `ids` alone, ascending and with `needed_ids`: id i is `ids[i]`.

    Raises ModelError for a kind of tokenizer that can't be reduced.
    """
    state = json.loads(tokenizer._backend.to_str())
    model, place = state["model"], {token: i for i, token in enumerate(ids)}
    spelled = {i: text for text, i in tokenizer.vocabulary.items()}
    if model["type"] not in ("BPE", "WordLevel", "WordPiece"):
        raise ModelError(
            f"a {model['type']} tokenizer can't be reduced: BPE, WordLevel and WordPiece can; "
            "keep the whole vocabulary"
        )
    kept = {spelled[token]: i for token, i in place.items() if token in spelled}
    model["vocab"] = kept
    if model["type"] == "BPE":
        model["merges"] = [pair for pair in model["merges"] if _joins(pair, kept, model)]
    state["added_tokens"] = [
        {**token, "id": kept[token["content"]]} for token in state["added_tokens"]
    ]
    state["post_processor"] = None  # it would put ids of the whole vocabulary before a text
    return Tokenizer(
        Backend.from_str(json.dumps(state)),
        chat_template=tokenizer.chat_template,
        special_tokens=named_tokens(tokenizer),
        eos_ids=[place[token] for token in tokenizer.eos_ids],
    )


def named_tokens(tokenizer: Tokenizer) -> dict[str, str]:
    """The named tokens that a model's files have to tell: what begins and ends a text."""
    spelled = {i: text for text, i in tokenizer.vocabulary.items()}
    named = {"bos_token": tokenizer.bos_id, "eos_token": next(iter(tokenizer.eos_ids), None)}
    return {name: spelled[token] for name, token in named.items() if token is not None}


def _joins(pair: Any, kept: Mapping[str, int], model: Mapping[str, Any]) -> bool:
    """Whether both parts of a merge and what it makes are kept."""
    first, second = pair.split(" ", 1) if isinstance(pair, str) else pair
    prefix = model.get("continuing_subword_prefix") or ""
    return first in kept and second in kept and first + second.removeprefix(prefix) in kept
