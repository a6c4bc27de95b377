"""How logits become the distribution that is sampled, and the token that is drawn from it.

Knows one row of logits and the history before it; knows no request, model or random generator.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from foredraft.core.errors import InvalidRequest, ModelError
from foredraft.core.history import History
from foredraft.core.penalties import Penalties
from foredraft.core.row_math import RowMath
from foredraft.core.sampling_params import SamplingParams
from foredraft.core.truncation import keep_min_p, keep_top

__all__ = ["History", "Sampler", "SamplingParams"]


class Sampler:
    """The processors of one request, compiled once; immutable.

    They run in vLLM's order: grammar mask, allowed and banned ids, min_tokens (no end token yet),
    logit_bias, penalties (repetition, frequency, presence), temperature, min_p, top_k, top_p on
    what top_k left. Greedy stops after the penalties: what follows never changes the argmax.

    Args:
        params: the request's.
        vocab_size: V, the length of every row.
        end_token_ids: EOS and stop ids, banned until `min_tokens` are out; ids beyond V are none of
            the row's.
        row_math: all sums and maxima between logits and token.
        device: of the rows.

    Attributes:
        greedy: temperature 0.
        plain_argmax: greedy, and no processor can change the argmax: `row_math.argmax_rows` says it
            all.

    Raises:
        InvalidRequest: a token id lies beyond the vocabulary, or no id is left.
    """

    __slots__ = (
        "_bias",
        "_bias_ids",
        "_end_ids",
        "_forbidden",
        "_params",
        "_penalties",
        "_row_math",
        "_top_k",
        "greedy",
        "plain_argmax",
        "vocab_size",
    )

    def __init__(
        self,
        params: SamplingParams,
        vocab_size: int,
        end_token_ids: frozenset[int],
        row_math: RowMath,
        device: torch.device | str = "cpu",
    ) -> None:
        _check_ids(params, vocab_size)
        self._params = params
        self._row_math = row_math
        self.vocab_size = vocab_size
        self._penalties = Penalties(
            params.repetition_penalty, params.frequency_penalty, params.presence_penalty
        )
        self._top_k = max(params.top_k, 0)
        self._forbidden = _forbidden_ids(params, vocab_size, device)
        end_ids = sorted(token for token in end_token_ids if token < vocab_size)
        self._end_ids = torch.tensor(end_ids, dtype=torch.int64, device=device)
        bias = params.logit_bias or {}
        self._bias_ids = torch.tensor(list(bias), dtype=torch.int64, device=device)
        self._bias = torch.tensor(list(bias.values()), dtype=torch.float64, device=device)
        self.greedy = params.temperature == 0.0
        self.plain_argmax = self.greedy and not (
            self._adjusts_always or (params.min_tokens > 0 and end_ids)
        )

    def start(self, prompt: Sequence[int]) -> History:
        """The history of a request of which only the prompt is known."""
        return History.start(prompt)

    def process(self, row: Tensor, history: History, mask: Tensor | None = None) -> Tensor:
        """The processed logits: `softmax` of them is the law; for greedy, their argmax is the
        token.

        Args:
            row: `[V]` float32 or float64 logits; never written to, but returned as is where nothing
                applies.
            history: of this row, its path of draft tokens included.
            mask: `[V]` bool, what the grammar allows.

        Returns:
            `[V]` in the dtype of `row`, `-inf` outside the support.
        """
        params = self._params
        logits = self._adjusted(row, history, mask)
        if self.greedy:
            return logits
        if params.temperature != 1.0:
            logits = logits / params.temperature
        if params.min_p > 0.0:
            logits = keep_min_p(logits, params.min_p, self._row_math)
        return keep_top(logits, self._top_k, params.top_p, self._row_math)

    def law(self, row: Tensor, history: History, mask: Tensor | None = None) -> Tensor:
        """`[V]` float64: the target's law at this row, one-hot where greedy. Raises as `token`
        does.
        """
        logits = self.process(row, history, mask)
        best = self._row_math.argmax(logits)
        self.check_chosen(logits, best, history)
        if self.greedy:
            probs = torch.zeros(row.shape, dtype=torch.float64, device=row.device)
            probs[best] = 1.0
            return probs
        return self._row_math.softmax(logits)

    def token(
        self,
        row: Tensor,
        history: History,
        seed: int,
        position: int,
        mask: Tensor | None = None,
    ) -> int:
        """The target's own token: the argmax, of log p + the noise of (seed, position) above
        temperature 0.

        Raises:
            InvalidRequest: the processors leave no token.
            ModelError: the logits are not numbers.
        """
        logits = self.process(row, history, mask)
        if self.greedy:
            chosen = self._row_math.argmax(logits)
        else:
            chosen = self._row_math.coupled_argmax(logits, seed, position)
        self.check_chosen(logits, chosen, history)
        return chosen

    @property
    def _adjusts_always(self) -> bool:
        return self._penalties.active or self._forbidden is not None or self._bias_ids.numel() > 0

    def _adjusted(self, row: Tensor, history: History, mask: Tensor | None) -> Tensor:
        """The processors that can change the argmax."""
        bans_end = self._end_ids.numel() > 0 and history.num_output < self._params.min_tokens
        if mask is None and not bans_end and not self._adjusts_always:
            return row
        logits = row.clone()
        if mask is not None:
            logits.masked_fill_(~mask, -math.inf)
        if self._forbidden is not None:
            logits.masked_fill_(self._forbidden, -math.inf)
        if bans_end:
            logits[self._end_ids] = -math.inf
        if self._bias_ids.numel() > 0:
            logits[self._bias_ids] += self._bias.to(logits.dtype)
        if self._penalties.active:
            self._penalties.apply_(logits, history)
        return logits

    def check_chosen(self, logits: Tensor, chosen: int, history: History) -> None:
        """Raise what `token` raises if the best of `logits` is no number, or no token is left."""
        value = float(logits[chosen])
        if math.isfinite(value):
            return
        if value == -math.inf:
            raise InvalidRequest(
                f"no token is left for output token {history.num_output + 1}: allowed_token_ids,"
                " banned_token_ids, min_tokens and the grammar exclude the whole vocabulary"
            )
        raise ModelError(
            f"the logit of token {chosen} is {value} at output token {history.num_output + 1}:"
            " logits must be finite"
        )


def _check_ids(params: SamplingParams, vocab_size: int) -> None:
    fields: dict[str, Sequence[int] | Mapping[int, float] | None] = {
        "logit_bias": params.logit_bias,
        "allowed_token_ids": params.allowed_token_ids,
        "banned_token_ids": params.banned_token_ids,
        "stop_token_ids": params.stop_token_ids,
    }
    for name, tokens in fields.items():
        for token in tokens or ():
            if token >= vocab_size:
                raise InvalidRequest(
                    f"{name} holds token id {token}: valid ids are 0 .. {vocab_size - 1}"
                )
    for name, count in (("logprobs", params.logprobs), ("prompt_logprobs", params.prompt_logprobs)):
        if count is not None and count > vocab_size:
            raise InvalidRequest(
                f"{name} must be at most the vocabulary size {vocab_size}, got {count}"
            )


def _forbidden_ids(
    params: SamplingParams, vocab_size: int, device: torch.device | str
) -> Tensor | None:
    """`[V]` bool, or None where every id is allowed."""
    if params.allowed_token_ids is None and not params.banned_token_ids:
        return None
    forbidden = torch.zeros(vocab_size, dtype=torch.bool, device=device)
    if params.allowed_token_ids is not None:
        forbidden.fill_(True)
        forbidden[list(params.allowed_token_ids)] = False
    forbidden[list(params.banned_token_ids or ())] = True
    if bool(forbidden.all()):
        raise InvalidRequest(
            "banned_token_ids leaves no token: at least one id of allowed_token_ids (all ids, where"
            " it is not given) must not be banned"
        )
    return forbidden
