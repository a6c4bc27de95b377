"""Many requests judged together are judged as each alone, to the bit, whatever their rules."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from foredraft.core.acceptance import BadRow, Verdict, Walk, decide, decide_all, match
from foredraft.core.block_verification import block
from foredraft.core.rejection import rejection
from foredraft.core.row_math import TorchRowMath
from foredraft.core.synthetic import synthetic
from foredraft.core.trees import Topology, chain, topology
from foredraft.core.typical import typical
from foredraft.testing.draft_sources import regular_tree
from foredraft.testing.siblings import SIBLING_LAWS
from foredraft.testing.tables import KINDS, random_law

V = 6
ROW_MATH = TorchRowMath()
SHAPES = ((), (1,), (2, 2), (3, 2), (1, 1, 1), (4,), (2, 1, 2))
RULES = ("match", "rejection", "block", "typical", "synthetic")


@dataclass(frozen=True, slots=True)
class Request:
    """One request of a ragged batch: a rule, a draft with its laws, a target and coins."""

    rule: str
    tree: Topology
    tokens: tuple[int, ...]
    probs: Tensor | None
    target: Callable[[tuple[int, ...]], Tensor]
    coins: tuple[float, ...]
    bad_node: int | None

    def walk(self) -> Walk[Any]:
        accept_coin, last = self.coins.__getitem__, self.coins[-1]
        if self.rule == "match":
            return match(self.tree, self.tokens)
        if self.rule == "block":
            return block(self.tokens, self.probs, accept_coin, last, ROW_MATH)
        if self.rule == "typical":
            return typical(self.tree, self.tokens, last, ROW_MATH)
        if self.rule == "synthetic":
            return synthetic(self.tree, (0.9, 0.5, 0.2), accept_coin(0), last, ROW_MATH)
        return rejection(self.tree, self.tokens, self.probs, accept_coin, last, ROW_MATH)

    def answer(self, node: int) -> Any:
        if node == self.bad_node:
            raise BadRow(node, f"bad row {node}")
        law = self.target(tuple(self.tokens[i] for i in self.tree.path(node)))
        return int(law.argmax()) if self.rule == "match" else law


def requests(seed: int, count: int) -> list[Request]:
    generator = torch.Generator().manual_seed(seed)

    def pick(options: Sequence[Any]) -> Any:
        return options[int(torch.randint(len(options), (1,), generator=generator))]

    made = []
    for index in range(count):
        rule = pick(RULES)
        shape = pick(SHAPES)
        tree = chain(len(shape)) if rule == "block" else topology(regular_tree(*shape))
        draft = random_law(seed * 1000 + index, V, pick(KINDS))
        siblings = SIBLING_LAWS[pick(list(SIBLING_LAWS))]
        tokens: list[int] = []
        rows: list[Tensor] = []
        for node, parent in enumerate(tree.parents):
            prefix = tuple(tokens[i] for i in tree.path(parent))
            earlier = [tokens[i] for i in tree.children(parent) if i < node]
            rows.append(siblings(draft(prefix), earlier, len(tree.children(parent))))
            tokens.append(int(torch.multinomial(rows[-1], 1, generator=generator)))
        probs = torch.stack(rows) if rows and pick([True, True, False]) else None
        coins = torch.rand(len(tree) + 2, generator=generator, dtype=torch.float64).tolist()
        target = random_law(seed * 1000 + index + 500, V, pick(KINDS))
        bad_node = pick([None, None, None, -1, 0])
        made.append(Request(rule, tree, tuple(tokens), probs, target, tuple(coins), bad_node))
    return made


def outcome(judge: Callable[[], Verdict]) -> object:
    try:
        return judge()
    except BadRow as bad:
        return bad.node, str(bad)


@pytest.mark.parametrize("seed", range(6))
def test_a_ragged_batch_is_each_request_alone(seed: int) -> None:
    batch = requests(seed, 40)
    rounds = 0

    def answer(asked: Sequence[tuple[int, int]]) -> list[Any]:
        nonlocal rounds
        rounds += 1
        replies = []
        for index, node in asked:
            try:
                replies.append(batch[index].answer(node))
            except BadRow as bad:
                replies.append(bad)
        return replies

    together = decide_all([request.walk() for request in batch], answer)
    alone = [
        outcome(lambda request=request: decide(request.walk(), request.answer)) for request in batch
    ]
    assert [
        (each.node, str(each)) if isinstance(each, BadRow) else each for each in together
    ] == alone
    assert sum(isinstance(each, tuple) for each in alone) > 0
    assert len({request.rule for request in batch}) == len(RULES)
    # One round a depth; typical acceptance may look at every node.
    assert rounds <= max(len(request.tree) for request in batch) + 1
