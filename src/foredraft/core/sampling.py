"""How logits become the distribution that is sampled, and the token that is drawn from it.

Knows one row of logits and the history before it; knows no request, model or random generator.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from foredraft.core.errors import InvalidRequest, ModelError, UserError
from foredraft.core.history import History
from foredraft.core.penalties import Penalties
from foredraft.core.row_math import RowMath
from foredraft.core.sampling_params import SamplingParams
from foredraft.core.truncation import Truncation, truncate

__all__ = ["History", "Row", "Sampler", "SamplingParams", "answers"]


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
        truncation: what comes after the penalties, above temperature 0.

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
        "greedy",
        "plain_argmax",
        "truncation",
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
        top_k = min(max(params.top_k, 0), vocab_size)
        self.truncation = Truncation(
            params.temperature or 1.0, params.min_p, int(top_k), params.top_p
        )
        self._forbidden = _forbidden_ids(params, vocab_size, device)
        end_ids = sorted(token for token in end_token_ids if token < vocab_size)
        self._end_ids = torch.tensor(end_ids, dtype=torch.int64, device=device)
        bias = params.logit_bias or {}
        self._bias_ids = torch.tensor(list(bias), dtype=torch.int64, device=device)
        self._bias = torch.tensor(list(bias.values()), dtype=torch.float64, device=device)
        self.greedy = params.temperature == 0.0
        self.plain_argmax = self.greedy and not (
            self._adjusts_always
            or (params.min_tokens > 0 and end_ids)
            or params.structured_outputs is not None
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
        logits = self.adjusted(row, history, mask)
        return logits if self.greedy else truncate(logits, self.truncation)

    def law(self, row: Tensor, history: History, mask: Tensor | None = None) -> Tensor:
        """`[V]` float64: the target's law at this row, one-hot where greedy. Raises as `token`
        does.
        """
        law = laws([Row(self, row, history, mask=mask)], self._row_math)[0]
        if isinstance(law, UserError):
            raise law
        return law

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
        token = tokens([Row(self, row, history, seed, position, mask)], self._row_math)[0]
        if isinstance(token, UserError):
            raise token
        return token

    @property
    def _adjusts_always(self) -> bool:
        return self._penalties.active or self._forbidden is not None or self._bias_ids.numel() > 0

    def adjusted(self, row: Tensor, history: History, mask: Tensor | None = None) -> Tensor:
        """`process` up to the penalties: the processors that can change the argmax."""
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


@dataclass(frozen=True, slots=True)
class Row:
    """A row of logits `[V]` that a sampler is to read."""

    sampler: Sampler
    logits: Tensor
    history: History
    seed: int = 0
    position: int = 0
    mask: Tensor | None = None  # `[V]` bool, what the grammar allows

    def adjusted(self) -> Tensor:
        """See `Sampler.adjusted`."""
        return self.sampler.adjusted(self.logits, self.history, self.mask)


def tokens(rows: Sequence[Row], row_math: RowMath) -> list[int | UserError]:
    """`Sampler.token` of many rows at once, and what it would raise."""
    adjusted = [row.adjusted() for row in rows]
    chosen: dict[int, int] = {}
    for greedy in (True, False):
        group = [i for i, row in enumerate(rows) if row.sampler.greedy == greedy]
        logits = [adjusted[i] for i in group]
        if greedy:
            ids = [row_math.argmax_rows(each[None])[0] for each in logits]
        else:
            truncations = [rows[i].sampler.truncation for i in group]
            keys = [(rows[i].seed, rows[i].position) for i in group]
            ids = row_math.draws(logits, truncations, keys) if group else []
        chosen |= zip(group, ids, strict=True)
    found: list[int | UserError] = []
    for i, row in enumerate(rows):
        error = _failure(row, adjusted[i], chosen[i])
        found.append(chosen[i] if error is None else error)
    return found


def laws(rows: Sequence[Row], row_math: RowMath) -> list[Tensor | UserError]:
    """`Sampler.law` of many rows at once, and what it would raise."""
    adjusted = [row.adjusted() for row in rows]
    probs, best = row_math.laws(adjusted, [row.sampler.truncation for row in rows])
    found: list[Tensor | UserError] = []
    for row, logits, law, top in zip(rows, adjusted, probs, best, strict=True):
        error = _failure(row, logits, top)
        if error is None and row.sampler.greedy:
            law = torch.zeros(logits.shape, dtype=torch.float64, device=logits.device)
            law[top] = 1.0
        found.append(law if error is None else error)
    return found


def answers(rows: Sequence[tuple[Row, bool]], row_math: RowMath) -> list[int | Tensor | UserError]:
    """Per (row, by own token): the token that `tokens` gives, or the law that `laws` gives."""
    own = [i for i, (_, by_own_token) in enumerate(rows) if by_own_token]
    weighed = [i for i, (_, by_own_token) in enumerate(rows) if not by_own_token]
    found: dict[int, int | Tensor | UserError] = {}
    found |= zip(own, tokens([rows[i][0] for i in own], row_math), strict=True)
    found |= zip(weighed, laws([rows[i][0] for i in weighed], row_math), strict=True)
    return [found[i] for i in range(len(rows))]


def _failure(row: Row, adjusted: Tensor, chosen: int) -> UserError | None:
    temperature = row.sampler.truncation.temperature
    value = adjusted[chosen].item()
    return failure(value, chosen, row.history.num_output, temperature, adjusted.dtype)


def failure(
    value: float,
    chosen: int,
    num_output: int,
    temperature: float = 1.0,
    dtype: torch.dtype = torch.float32,
) -> UserError | None:
    """Why `chosen`, the best id of a row, cannot be the token after `num_output` of output; None
    where it can. `value` is its logit, of a row of `dtype`.
    """
    if temperature == 1.0 and math.isfinite(value):
        return None
    where = f"at output token {num_output + 1}"
    if value == -math.inf:
        return InvalidRequest(
            f"no token is left for output token {num_output + 1}: allowed_token_ids,"
            " banned_token_ids, min_tokens and the grammar exclude the whole vocabulary"
        )
    if not math.isfinite(value):
        return ModelError(f"the logit of token {chosen} is {value} {where}: logits must be finite")
    if not math.isfinite(float(torch.tensor(value, dtype=dtype) / temperature)):
        return ModelError(
            f"the logit of token {chosen} is {value:g} {where}: divided by temperature"
            f" {temperature:g} it leaves {str(dtype).removeprefix('torch.')}"
        )
    return None


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
