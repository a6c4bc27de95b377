"""Log-probabilities as OpenAI's two kinds of completion spell them, exact to the byte.

Knows tokens' bytes; knows no request.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from foredraft.engine.outputs import TokenLogprobs
from foredraft.models.detokenizer import Detokenizer
from foredraft.models.tokenizer import Tokenizer

LOWEST = -9999.0  # stands for minus infinity, which JSON has not


def chat_logprobs(tokenizer: Tokenizer, logprobs: Sequence[TokenLogprobs]) -> dict[str, Any]:
    """The `logprobs` of a choice of a chat: one entry a token."""
    return {
        "content": [
            {
                **_entry(tokenizer, each.token_id, each.logprob),
                "top_logprobs": [
                    _entry(tokenizer, token, value) for token, value in each.top.items()
                ],
            }
            for each in logprobs
        ],
        "refusal": None,
    }


def _entry(tokenizer: Tokenizer, token: int, logprob: float) -> dict[str, Any]:
    spelling = tokenizer.token_bytes(token, skip_special_tokens=False)
    return {
        "token": spelling.decode("utf-8", "replace"),
        "logprob": _finite(logprob),
        "bytes": list(spelling),
    }


class CompletionLogprobs:
    """The `logprobs` of a choice of `/v1/completions`, token by token; `offset` is where in the
    text its first token begins.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool, offset: int = 0) -> None:
        self._tokenizer = tokenizer
        self._detokenizer = Detokenizer(tokenizer, skip_special_tokens)
        self._offset = offset

    def of(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs | None]) -> Any:
        """Of the next tokens; None for a token that nothing is known of, the first of a prompt."""
        offsets = []
        for token in token_ids:
            offsets.append(self._offset)
            self._offset += len(self._detokenizer.push([token]))
        tops: list[Mapping[str, float] | None] = []
        for each in logprobs:
            if each is None:
                tops.append(None)
                continue
            # As OpenAI: the chosen token is always among them.
            found = {**each.top, each.token_id: each.logprob}
            tops.append({self._spelled(id_): _finite(value) for id_, value in found.items()})
        return {
            "tokens": [self._spelled(token) for token in token_ids],
            "token_logprobs": [
                None if each is None else _finite(each.logprob) for each in logprobs
            ],
            "top_logprobs": tops,
            "text_offset": offsets,
        }

    def _spelled(self, token: int) -> str:
        """A token's text; one that is no whole character as "bytes:\\xe2\\x80"."""
        spelling = self._tokenizer.token_bytes(token, skip_special_tokens=False)
        try:
            return spelling.decode("utf-8")
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in spelling)


def prompt_logprobs(
    tokenizer: Tokenizer, given: Sequence[TokenLogprobs | None]
) -> list[dict[str, Any] | None]:
    """vLLM's form: for each token of the prompt, ids to what is known of them."""
    entries: list[dict[str, Any] | None] = []
    for each in given:
        if each is None:
            entries.append(None)
            continue
        ranks = {token: rank for rank, token in enumerate(each.top, start=1)}
        found = {**each.top, each.token_id: each.logprob}
        entries.append(
            {
                str(token): {
                    "logprob": _finite(value),
                    "rank": ranks.get(token, each.rank),
                    "decoded_token": tokenizer.token_text(token),
                }
                for token, value in found.items()
            }
        )
    return entries


def _finite(logprob: float) -> float:
    return max(LOWEST, logprob)
