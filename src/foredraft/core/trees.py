"""A draft tree's topology, compiled once per shape and cached.

Knows parents; knows no tokens, laws or requests. A tree is written as the list of its nodes'
parents, a parent before its children, -1 for the root. The root is the pending token and is not a
draft node; a chain of n is (-1, 0, ..., n - 2).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch
from torch import Tensor

ROOT = -1


@dataclass(frozen=True)
class Topology:
    """The shape of one draft tree of n nodes; made by `topology`."""

    parents: tuple[int, ...]  # [n]
    depths: tuple[int, ...]  # [n], a child of the root has depth 1
    _children: tuple[tuple[int, ...], ...]  # [n + 1], the root's children last
    is_chain: bool

    def __len__(self) -> int:
        return len(self.parents)

    @property
    def max_depth(self) -> int:
        """0 for the empty tree."""
        return max(self.depths, default=0)

    def children(self, node: int) -> tuple[int, ...]:
        """The children of `node` (-1 = the root) in draw order."""
        return self._children[node]

    def path(self, node: int) -> tuple[int, ...]:
        """The nodes from the root's child down to `node`, both included; () for the root."""
        nodes: list[int] = []
        while node != ROOT:
            nodes.append(node)
            node = self.parents[node]
        return tuple(reversed(nodes))

    @cached_property
    def ancestors(self) -> Tensor:
        """`[n, n]` bool: entry (i, j) tells whether j is i or an ancestor of i. Shared: do not
        write to it.
        """
        mask = torch.zeros(len(self), len(self), dtype=torch.bool)
        for node in range(len(self)):
            mask[node, list(self.path(node))] = True
        return mask


@lru_cache(maxsize=4096)
def topology(parents: tuple[int, ...]) -> Topology:
    """The compiled topology of `parents`.

    Raises:
        ValueError: a parent is not -1 or the index of an earlier node.
    """
    depths: list[int] = []
    children: list[list[int]] = [[] for _ in range(len(parents) + 1)]
    for node, parent in enumerate(parents):
        if not ROOT <= parent < node:
            raise ValueError(
                f"draft node {node} has parent {parent}: valid are -1 (the root) and the earlier"
                f" nodes 0 .. {node - 1}"
            )
        depths.append(1 if parent == ROOT else depths[parent] + 1)
        children[parent].append(node)
    return Topology(
        parents=parents,
        depths=tuple(depths),
        _children=tuple(map(tuple, children)),
        is_chain=all(parent == node - 1 for node, parent in enumerate(parents)),
    )


def chain(length: int) -> Topology:
    """The topology of a chain of `length` nodes."""
    return topology(tuple(range(-1, length - 1)))
