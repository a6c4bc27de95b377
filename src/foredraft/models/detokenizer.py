"""Token ids back to text, a few at a time.

Knows how a `Tokenizer` spells its tokens; knows no request. The pieces of all pushes and of
`finish` put together equal `Tokenizer.decode` of all ids, and no piece ends inside a character.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence
from typing import Protocol


class Spelling(Protocol):
    """What a detokenizer needs of a tokenizer."""

    is_byte_level: bool

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str: ...
    def token_bytes(self, token_id: int, skip_special_tokens: bool) -> bytes: ...
    def is_unfinished(self, token_id: int) -> bool: ...


class Detokenizer:
    """One per running output."""

    def __init__(self, tokenizer: Spelling, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._bytes = codecs.getincrementaldecoder("utf-8")("replace")
        self._context: list[int] = []  # ids whose text is out; kept so that spacing is the same
        self._pending: list[int] = []  # ids whose text is not out yet

    def push(self, ids: Iterable[int]) -> str:
        """The text that `ids` complete; bytes of a character still unfinished wait."""
        if self._tokenizer.is_byte_level:
            spell, skip = self._tokenizer.token_bytes, self._skip
            return self._bytes.decode(b"".join(spell(token, skip) for token in ids))
        text = ""
        for token in ids:
            if not self._tokenizer.token_bytes(token, self._skip):
                continue
            self._pending.append(token)
            if not self._tokenizer.is_unfinished(token):
                text += self._flush()
        return text

    def finish(self) -> str:
        """What was still waiting; an unfinished character comes out as U+FFFD."""
        if self._tokenizer.is_byte_level:
            return self._bytes.decode(b"", final=True)
        return self._flush()

    def _flush(self) -> str:
        """The pending ids' text, read behind those before: some decoders drop a first space."""
        decode = self._tokenizer.decode
        before = decode(self._context, self._skip)
        text = decode(self._context + self._pending, self._skip)[len(before) :]
        if text:
            self._context = self._pending
        else:
            self._context = self._context + self._pending
        self._pending = []
        return text
