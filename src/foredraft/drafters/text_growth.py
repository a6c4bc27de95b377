"""Chains of a model that has a vocabulary of its own: it drafts text, and the target's tokenizer
reads it (SLEM, Timor et al. 2502.05202; universal assisted generation).

Knows requests, rows of logits and the two vocabularies; knows no model. The draft is the model's
most likely text, under none of the request's processors, whose ids are the target's. It is fixed,
so that the target verifies it by exact match.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from foredraft.core.row_math import RowMath
from foredraft.drafters.drawing import keep
from foredraft.drafters.growth import ChainGrowth, Computed, Rows
from foredraft.drafters.interface import Draft, DraftRequest
from foredraft.models.vocabulary import OtherVocabulary

LOOK_BACK = 10  # committed tokens that the text is read behind, so that words join


class TextGrowth(ChainGrowth):
    """A chain in the model's own ids; its draft is in the target's."""

    def __init__(
        self,
        request: DraftRequest,
        start: int,
        room: int,
        max_depth: int,
        vocabulary: OtherVocabulary,
    ) -> None:
        super().__init__(request, start, room, max_depth)
        self._vocabulary = vocabulary

    def rows(self) -> Rows:
        rows = super().rows()
        return replace(rows, own_ids=self.start >= len(self.request.tokens))

    @property
    def computed(self) -> Computed:
        """The drafted text is computed anew in the target's ids once it is committed."""
        return Computed(min(self.start, len(self.request.tokens)))

    def draft(self) -> Draft:
        request = self.request
        tail = request.tokens[-LOOK_BACK:]
        drafted = self.drawn.tokens
        tokens = self._vocabulary.respelled(tail, drafted)[: request.max_nodes] if drafted else []
        return Draft.chain(tokens, num_cached=self.computed.num_committed)


class TextGrower:
    """The most likely text, a token of the model's a pass."""

    def __init__(self, vocabulary: OtherVocabulary) -> None:
        self._vocabulary = vocabulary

    def open(self, request: DraftRequest, start: int, room: int, max_depth: int) -> TextGrowth:
        return TextGrowth(request, start, room, max_depth, self._vocabulary)

    def grow(self, growths: Sequence[TextGrowth], logits: Tensor, row_math: RowMath) -> None:
        best = row_math.argmax_rows(logits)
        for growth, row, token in zip(growths, logits, best, strict=True):
            keep(growth.drawn, token, row, row_math)
            growth.took(token)
