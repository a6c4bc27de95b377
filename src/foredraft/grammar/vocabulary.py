"""A model's vocabulary as grammars see it: the bytes of every token.

Knows tokens by a small interface and llguidance's tokenizer; knows no model and no grammar. One id
behind the vocabulary stands for the end of the answer, whatever ends answers of this model.
"""

from __future__ import annotations

from collections.abc import Set
from typing import Protocol

from llguidance import LLTokenizer, TokenizerWrapper


class TokenSource(Protocol):
    """What is read of a tokenizer."""

    @property
    def control_ids(self) -> Set[int]:
        """Ids that are no text."""

    def token_bytes(self, token_id: int, skip_special_tokens: bool = True) -> bytes:
        """What a token adds to the bytes of a text; nothing for an unknown id."""

    def encode(self, text: str) -> list[int]:
        """Ids of a text."""


class GrammarVocabulary:
    """Made once for a model: it takes some tenths of a second.

    Attributes:
        vocab_size: V, ids of the model.
        tokenizer: llguidance's, of V + 1 ids; the last one is the end.
    """

    def __init__(self, source: TokenSource, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        spelled = _Spelling(source, vocab_size)
        wrapper = TokenizerWrapper(spelled)
        self.tokenizer = LLTokenizer(wrapper, n_vocab=vocab_size + 1, eos_token=vocab_size)


class _Spelling:
    """A tokenizer in the form that llguidance reads."""

    bos_token_id = None

    def __init__(self, source: TokenSource, vocab_size: int) -> None:
        self._source = source
        self.eos_token_id = vocab_size
        self.tokens = [source.token_bytes(token, False) for token in range(vocab_size)]
        self.tokens.append(b"<end>")
        controls = [token for token in source.control_ids if token < vocab_size]
        self.special_token_ids = [*sorted(controls), vocab_size]
        self._ids: dict[bytes, int] = {}
        for token, spelling in enumerate(self.tokens[:vocab_size]):
            if spelling and token not in source.control_ids:
                self._ids.setdefault(spelling, token)
        self._longest = max(map(len, self._ids), default=1)

    def __call__(self, text: str | bytes) -> list[int]:
        """Ids whose bytes are those of `text`: as the tokenizer splits it, where that is so; some
        put a space before a text.
        """
        data = text if isinstance(text, bytes) else text.encode()
        ids = self._source.encode(data.decode())
        if all(token < self.eos_token_id for token in ids):
            spelled = b"".join(self.tokens[token] for token in ids)
            if spelled == data:
                return ids
        return self._longest_first(data)

    def _longest_first(self, data: bytes) -> list[int]:
        ids: list[int] = []
        at = 0
        while at < len(data):
            for end in range(min(len(data), at + self._longest), at, -1):
                token = self._ids.get(data[at:end])
                if token is not None:
                    ids.append(token)
                    at = end
                    break
            else:  # no token spells what follows
                break
        return ids
