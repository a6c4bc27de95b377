"""A drafter of trees whose tokens are drawn from a known law, siblings in a given way.

Knows a law per context and the coins of the request; knows no engine. In the coupled rule siblings
are the best of log q + the target's own noise, which all of a position share, and no law is given.
"""

from __future__ import annotations

import torch
from torch import Tensor

from foredraft.core import coins
from foredraft.core.acceptance import draw_from
from foredraft.core.row_math import RowMath, TorchRowMath
from foredraft.core.trees import topology
from foredraft.drafters.interface import Capabilities, Draft, DraftRequest
from foredraft.testing.sampled_drafters import Context, Rows
from foredraft.testing.scripted_drafters import ScriptedDrafter
from foredraft.testing.siblings import SiblingLaw, without_replacement


class SkewedTreeDrafter(ScriptedDrafter):
    """Draws a tree of shape `parents` from `law(context)`, `[V]` probabilities q of the next token.

    The shape is cut to the nodes asked for before anything is drawn. `Draft.probs` holds the law of
    each sibling given those before it.
    """

    capabilities = Capabilities(deterministic=False, tree=True)

    def __init__(
        self,
        law: Rows,
        parents: tuple[int, ...],
        siblings: SiblingLaw = without_replacement,
        row_math: RowMath | None = None,
    ) -> None:
        self.law = law
        self.parents = parents
        self.siblings = siblings
        self.row_math = TorchRowMath() if row_math is None else row_math

    def draft(self, request: DraftRequest) -> Draft:
        tree = topology(self.parents[: request.max_nodes])
        context = tuple(request.tokens)
        tokens: list[int] = []
        laws: list[Tensor] = []
        for node, parent in enumerate(tree.parents):
            path = (*context, *(tokens[i] for i in tree.path(parent)))
            earlier = [tokens[i] for i in tree.children(parent) if i < node]
            if request.coupled:
                tokens.append(self._best(path, len(earlier), request.seed))
                continue
            row = self.siblings(self.law(path), earlier, len(tree.children(parent)))
            coin = coins.coin(request.seed, len(context), coins.DRAFT, node)
            tokens.append(draw_from(row, coin, self.row_math))
            laws.append(row)
        return Draft(tuple(tokens), tree.parents, torch.stack(laws) if laws else None)

    def _best(self, path: Context, rank: int, seed: int) -> int:
        """The token of the given rank by log q + the noise of its position."""
        q = self.law(path)
        noisy = q.log() + coins.gumbel_noise(seed, len(path), q.numel())
        return int(torch.sort(noisy, descending=True, stable=True).indices[rank])
