"""Random drafts for the enumeration: drawn from a law, fixed, or one of several.

Knows trees, laws and choices; knows no rule. A drawn token is chosen when it is first looked at, so
that what a rule never looks at is not enumerated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Protocol, overload

import torch
from torch import Tensor

from foredraft.core.acceptance import Rows
from foredraft.core.trees import Topology, chain, topology
from foredraft.testing.branches import Choices
from foredraft.testing.siblings import SiblingLaw, with_replacement


class ScriptedDraft(Protocol):
    """A draft as a rule sees it."""

    @property
    def tree(self) -> Topology: ...

    @property
    def tokens(self) -> Sequence[int]: ...

    @property
    def probs(self) -> Rows | None: ...

    @property
    def looked_at(self) -> Mapping[int, int]:
        """The nodes whose tokens matter so far, with their tokens."""


DraftSource = Callable[[Choices], ScriptedDraft]


@dataclass(frozen=True, slots=True)
class WeightedDraft:
    """One draft a drafter may propose, the probability that it does, and the laws it was drawn
    from.
    """

    weight: float
    tokens: Sequence[int]
    probs: Tensor | None  # [n, V]; None = deterministic
    parents: Sequence[int] | None = None  # None: a chain

    @property
    def tree(self) -> Topology:
        return chain(len(self.tokens)) if self.parents is None else topology(tuple(self.parents))

    @property
    def looked_at(self) -> Mapping[int, int]:
        return dict(enumerate(self.tokens))


def one_of(drafts: Iterable[WeightedDraft]) -> DraftSource:
    """One of `drafts`, by their weights, which add up to 1."""
    listed = list(drafts)
    weights = [draft.weight for draft in listed]
    if abs(sum(weights) - 1.0) > 1e-9:
        raise ValueError(f"the weights of the drafts must add up to 1, got {sum(weights)}")
    return lambda choices: listed[choices.choose(weights)]


def fixed_draft(tokens: Sequence[int], parents: Sequence[int] | None = None) -> DraftSource:
    """The deterministic draft `tokens`; without `parents` a chain."""
    return one_of([WeightedDraft(1.0, tuple(tokens), None, parents)])


def sampled_chains(law: Callable[[tuple[int, ...]], Tensor], depth: int) -> list[WeightedDraft]:
    """Every chain of `depth` tokens drawn from `law`, with its probability."""
    vocab_size = law(()).numel()
    drafts = []
    for tokens in product(range(vocab_size), repeat=depth):
        rows = [law(tokens[:offset]) for offset in range(depth)]
        weight = 1.0
        for row, token in zip(rows, tokens, strict=True):
            weight *= float(row[token])
        if weight > 0.0:
            drafts.append(WeightedDraft(weight, tokens, torch.stack(rows)))
    return drafts


def drawn_tree(
    parents: Sequence[int],
    law: Callable[[tuple[int, ...]], Tensor],
    siblings: SiblingLaw = with_replacement,
) -> DraftSource:
    """A tree of fixed shape whose tokens are drawn from `law`, siblings as `siblings` says."""
    tree = topology(tuple(parents))
    return lambda choices: _DrawnDraft(tree, law, siblings, choices)


def drawn_chain(law: Callable[[tuple[int, ...]], Tensor], depth: int) -> DraftSource:
    """A chain of `depth` tokens drawn from `law`."""
    return drawn_tree(range(-1, depth - 1), law)


def regular_tree(*branching: int) -> tuple[int, ...]:
    """Parents of the tree whose nodes at depth d have `branching[d]` children, level by level."""
    levels = [[-1]]
    parents: list[int] = []
    for count in branching:
        level = [parent for parent in levels[-1] for _ in range(count)]
        levels.append(list(range(len(parents), len(parents) + len(level))))
        parents += level
    return tuple(parents)


class _DrawnDraft:
    def __init__(
        self,
        tree: Topology,
        law: Callable[[tuple[int, ...]], Tensor],
        siblings: SiblingLaw,
        choices: Choices,
    ) -> None:
        self.tree = tree
        self.looked_at: dict[int, int] = {}
        self.probs: Rows = _DrawnRows(self)
        self.tokens: Sequence[int] = _DrawnTokens(self)
        self._law = law
        self._siblings = siblings
        self._choices = choices
        self._rows: dict[int, Tensor] = {}

    def token(self, node: int) -> int:
        if node not in self.looked_at:
            self.looked_at[node] = self._choices.choose(self.row(node).tolist())
        return self.looked_at[node]

    def row(self, node: int) -> Tensor:
        if node not in self._rows:
            parent = self.tree.parents[node]
            siblings = self.tree.children(parent)
            prefix = tuple(self.token(each) for each in self.tree.path(parent))
            earlier = [self.token(each) for each in siblings if each < node]
            self._rows[node] = self._siblings(self._law(prefix), earlier, len(siblings))
        return self._rows[node]


class _DrawnRows:
    def __init__(self, draft: _DrawnDraft) -> None:
        self._draft = draft

    def __getitem__(self, node: int) -> Tensor:
        return self._draft.row(node)


class _DrawnTokens(Sequence[int]):
    def __init__(self, draft: _DrawnDraft) -> None:
        self._draft = draft

    def __len__(self) -> int:
        return len(self._draft.tree)

    @overload
    def __getitem__(self, node: int) -> int: ...
    @overload
    def __getitem__(self, node: slice) -> list[int]: ...
    def __getitem__(self, node: int | slice) -> int | list[int]:
        if isinstance(node, slice):
            return [self._draft.token(each) for each in range(*node.indices(len(self)))]
        if not 0 <= node < len(self):
            raise IndexError(f"node {node} of {len(self)}")
        return self._draft.token(node)
