"""Medusa's heads in plain torch: what is trained, and what the kernels' version is held to.

Knows tensors and one config; knows no file, no kernel and no request. Parameters are called as
vLLM's checkpoints call them, so that `state_dict` is one.
Shapes: B sequences, T positions, H the target's hidden size, D rows of a vocabulary head.

Formulas: Cai et al. 2401.10774. From the target's last hidden state at t (behind its final norm:
what its own head reads) head h guesses the token at t + 2 + h; the target's own is t + 1.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from foredraft.models.heads.config import MedusaConfig
from foredraft.models.heads.reduced import check_draft_ids


class ResidualBlocks(nn.Module):
    """`x + silu(W x + b)`, some times; it begins as the identity."""

    def __init__(self, config: MedusaConfig) -> None:
        super().__init__()
        hidden = config.hidden_size
        self.layers = nn.ModuleList(
            [nn.Linear(hidden, hidden, bias=config.bias) for _ in range(config.num_layers)]
        )
        for parameter in self.parameters():
            nn.init.zeros_(parameter)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + F.silu(layer(x))
        return x


class Medusa(nn.Module):
    """Heads for one target.

    `draft_ids [D]` int64: the target's ids that can be drafted, ascending; stored as `token_map`
    where the vocabulary is reduced.
    """

    draft_ids: Tensor

    def __init__(
        self,
        config: MedusaConfig,
        draft_ids: Tensor | None = None,
        head: Tensor | None = None,
    ) -> None:
        """
        Args:
            draft_ids: None: the first D, all of them where the vocabulary isn't reduced.
            head: `[V, H]`, the target's own vocabulary head: where the heads read it (`own_head`
                False), of which only the rows of `draft_ids` are; else own ones begin as it.

        Raises ModelError for ids that are no ascending ids of the target's, D in number.
        """
        super().__init__()
        self.config = config
        count = config.num_outputs
        draft_ids = torch.arange(count) if draft_ids is None else draft_ids
        check_draft_ids(draft_ids, count, config.vocab_size)
        self.register_buffer("draft_ids", draft_ids, persistent=False)
        self.blocks = nn.ModuleList([ResidualBlocks(config) for _ in range(config.num_heads)])
        rows = None if head is None else head if len(head) == count else head[draft_ids]
        self._shared_head = (rows,)  # in a tuple: no parameter of this module
        if config.own_head:
            number = 1 if config.shared_head else config.num_heads
            self.lm_heads = nn.ModuleList(
                [nn.Linear(config.hidden_size, count, bias=False) for _ in range(number)]
            )
            if rows is not None:
                for each in self.lm_heads.parameters():
                    each.data.copy_(rows)

    def hidden(self, index: int, x: Tensor) -> Tensor:
        """The target's last hidden states `[B, T, H]` through the blocks of one head."""
        out: Tensor = self.blocks[index](x)
        return out

    def logits(self, index: int, hidden: Tensor) -> Tensor:
        """What `hidden` gave of one head -> `[B, T, D]`."""
        if self.config.own_head:
            own: Tensor = self.lm_heads[0 if self.config.shared_head else index](hidden)
            return own
        (rows,) = self._shared_head
        if rows is None:
            raise RuntimeError("these heads were made without the target's vocabulary head")
        return F.linear(hidden, rows.to(hidden.dtype))

    def forward(self, x: Tensor) -> list[Tensor]:
        """The target's last hidden states `[B, T, H]` -> for each head `[B, T, D]`."""
        return [self.logits(i, self.hidden(i, x)) for i in range(self.config.num_heads)]
