"""Log-probabilities under the raw target, for the tokens a step committed and for prompts.

Knows one row of logits and the token that followed it; knows no processor: temperature, penalties
and masks don't count.
"""

from __future__ import annotations

import torch
from torch import Tensor

from foredraft.core.row_math import RowMath
from foredraft.engine.outputs import TokenLogprobs


def token_logprobs(row: Tensor, token: int, num_top: int, row_math: RowMath) -> TokenLogprobs:
    """Log-softmax of `row` `[V]` at `token`, its rank, and the `num_top` best ids (ties to the
    lowest id).
    """
    logprobs = row_math.log_softmax(row)
    chosen = logprobs[token]
    top: dict[int, float] = {}
    if num_top:
        num_top = min(num_top, logprobs.shape[0])
        # topk leaves the order of equal values open: take all that reach its last value, sort
        # those.
        threshold = torch.topk(logprobs, num_top).values[-1]
        ids = torch.nonzero(logprobs >= threshold).flatten()
        order = torch.sort(logprobs[ids], descending=True, stable=True).indices[:num_top]
        best = ids[order]
        top = dict(zip(best.tolist(), logprobs[best].tolist(), strict=True))
    rank = int((logprobs > chosen).count_nonzero()) + 1
    return TokenLogprobs(token, float(chosen), rank, top)
