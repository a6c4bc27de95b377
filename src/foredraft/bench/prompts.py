"""Prompts as token ids, from the texts of a workload.

Knows items and a tokenizer; knows no engine.
"""

from __future__ import annotations

from collections.abc import Sequence

from foredraft.bench.workload import Item
from foredraft.models.tokenizer import Tokenizer

LONGEST_TAIL = 32  # tokens that close a prompt of a chat template


def first_turn_ids(tokenizer: Tokenizer, item: Item) -> list[int]:
    """Token ids of the first user turn, in the chat template if the model has one."""
    if not tokenizer.has_chat_template:
        return tokenizer.encode_prompt(item.turns[0])
    return tokenizer.apply_chat_template([{"role": "user", "content": item.turns[0]}])


def lengthened(tokenizer: Tokenizer, items: Sequence[Item], length: int) -> list[int]:
    """Exactly `length` tokens: the texts of `items`, in the chat template, cut before its end."""
    texts: list[str] = []
    ids: list[int] = []
    while len(ids) < length:
        grown = 1 + length // (1 + len(ids)) if texts else 4
        texts += [items[(len(texts) + n) % len(items)].turns[0] for n in range(min(grown, 64))]
        joined = Item(items[0].id, items[0].task, ("\n\n".join(texts),))
        ids = first_turn_ids(tokenizer, joined)
    tail = min(LONGEST_TAIL, length // 2)
    return [*ids[: length - tail], *ids[len(ids) - tail :]]
