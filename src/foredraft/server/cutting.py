"""Cuts what a step emitted into its single tokens.

Knows deltas and a tokenizer; knows no format. The parts' texts and tokens, joined, are the delta's.
"""

from __future__ import annotations

from collections.abc import Sequence

from foredraft.engine.outputs import StreamDelta
from foredraft.engine.stops import safe_text_length
from foredraft.models.tokenizer import Detokenizer, Tokenizer


class TokenCutter:
    """For the deltas of one completion, in their order.

    Text that was held back (half a character, what may become one of the `stops`) comes with the
    token that released it, however the tokens were grouped.
    """

    def __init__(
        self, tokenizer: Tokenizer, skip_special_tokens: bool, stops: Sequence[str] = ()
    ) -> None:
        self._detokenizer = Detokenizer(tokenizer, skip_special_tokens)
        self._stops = stops
        self._decoded = ""  # the text through the last token
        self._shown = 0  # characters of it that were handed out

    def cut(self, delta: StreamDelta) -> list[StreamDelta]:
        """One delta a token; the last has what ended the completion."""
        if len(delta.token_ids) < 2:
            for token in delta.token_ids:
                self._decoded += self._detokenizer.push([token])
            self._shown += len(delta.text)
            return [delta]
        first, last = self._shown, self._shown + len(delta.text)
        parts = []
        for at, token in enumerate(delta.token_ids):
            self._decoded += self._detokenizer.push([token])
            ends = at == len(delta.token_ids) - 1
            safe = safe_text_length(self._stops, self._decoded)
            end = last if ends else max(self._shown, min(safe, last))
            parts.append(
                StreamDelta(
                    delta.text[self._shown - first : end - first],
                    [token],
                    delta.origins[at : at + 1],
                    delta.finished if ends else None,
                    index=delta.index,
                    emitted_at=delta.emitted_at,
                    completion=delta.completion if ends else None,
                    logprobs=delta.logprobs[at : at + 1],
                )
            )
            self._shown = end
        return parts
