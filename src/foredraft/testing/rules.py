"""The table of acceptance rules: what each is for, its formula and source, and its expected tokens
on two example laws, worked out by enumeration.

Knows the rules and the enumeration; knows no model and no terminal. `docs/rules.md` holds the table
as `as_markdown` writes it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from foredraft.core.acceptance import Coins, Rows, Walk
from foredraft.core.trees import Topology
from foredraft.core.typical import typical
from foredraft.testing.closed_forms import chain_tokens, coupled_joint, prefix_bound
from foredraft.testing.draft_sources import (
    DraftSource,
    drawn_chain,
    drawn_tree,
    fixed_draft,
    regular_tree,
)
from foredraft.testing.law import (
    ROW_MATH,
    Rule,
    emitted_law,
    exact_block,
    exact_rejection,
    expected_tokens,
    sample_and_match,
)
from foredraft.testing.siblings import (
    SiblingLaw,
    top_and_one,
    with_replacement,
    without_replacement,
)

DEPTH = 3
BRANCHING = (2, 2, 2)  # of the trees: 14 nodes, as deep as the chains


@dataclass(frozen=True, slots=True)
class Example:
    """A target's law and a drafter's, the same after every prefix."""

    name: str
    target_probs: tuple[float, ...]
    draft_probs: tuple[float, ...]

    @property
    def p(self) -> Tensor:
        return torch.tensor(self.target_probs, dtype=torch.float64)

    @property
    def q(self) -> Tensor:
        return torch.tensor(self.draft_probs, dtype=torch.float64)


EXAMPLES = (
    Example("close", (0.5, 0.25, 0.15, 0.1), (0.4, 0.3, 0.2, 0.1)),
    Example("apart", (0.4, 0.3, 0.2, 0.1), (0.1, 0.2, 0.3, 0.4)),
)


@dataclass(frozen=True, slots=True)
class RuleEntry:
    """One line of the table."""

    method: str  # rejection_sample_method, or "temperature 0"
    draft: str
    accepts: str  # at one node, given that it is reached
    source: str
    exact: bool
    tokens: tuple[float, ...]  # expected tokens of a step, for each of EXAMPLES


Tokens = Callable[[Example], float]


def rules_table() -> list[RuleEntry]:
    """All rules, with drafts of `DEPTH` tokens in chains and of `BRANCHING` in trees."""
    return [
        RuleEntry(method, draft, accepts, source, exact, tuple(map(tokens, EXAMPLES)))
        for method, draft, accepts, source, exact, tokens in _LINES
    ]


def as_markdown(entries: Sequence[RuleEntry]) -> str:
    """The table in Markdown, a line per rule."""
    examples = [example.name for example in EXAMPLES]
    head = ["`rejection_sample_method`", "draft", "accepts", "source", "law", *examples]
    lines = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    for entry in entries:
        cells = [
            entry.method,
            entry.draft,
            entry.accepts,
            entry.source,
            "exact" if entry.exact else "**lossy**",
            *(f"{tokens:.3f}" for tokens in entry.tokens),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _law(row: Tensor) -> Callable[[tuple[int, ...]], Tensor]:
    return lambda prefix: row


def _enumerated(rule: Rule, source: Callable[[Example], DraftSource]) -> Tokens:
    return lambda each: expected_tokens(emitted_law(rule, _law(each.p), source(each)))


def _tree(siblings: SiblingLaw) -> Callable[[Example], DraftSource]:
    return lambda each: drawn_tree(regular_tree(*BRANCHING), _law(each.q), siblings)


def _top_chain(each: Example) -> DraftSource:
    return fixed_draft([int(each.q.argmax())] * DEPTH)


def _top_tree(each: Example) -> DraftSource:
    """The two most likely tokens of q below every node."""
    parents = regular_tree(*BRANCHING)
    top = each.q.topk(2).indices.tolist()
    return fixed_draft([top[node % 2] for node in range(len(parents))], parents)


def _greedy(each: Example) -> float:
    """At temperature 0 the target's law is one-hot."""
    row = torch.zeros_like(each.p)
    row[int(each.p.argmax())] = 1.0
    return expected_tokens(emitted_law(sample_and_match, _law(row), _top_chain(each)))


def _typical(
    tree: Topology,
    tokens: Sequence[int],
    draft_probs: Rows | None,
    accept_coin: Coins,
    residual_coin: float,
) -> Walk[Tensor]:
    return typical(tree, tokens, residual_coin, ROW_MATH)


_LINES: tuple[tuple[str, str, str, str, bool, Tokens], ...] = (
    (
        "temperature 0",
        "chain, most likely tokens",
        "1 if x = argmax p",
        "Stern et al. 1811.03115",
        True,
        _greedy,
    ),
    (
        "coupled",
        "chain, drawn with the target's noise",
        "sum_x 1 / sum_y max(p_y/p_x, q_y/q_x)",
        "Daliri et al. 2408.07978",
        True,
        lambda each: chain_tokens(_law(each.p), _law(each.q), DEPTH, coupled_joint),
    ),
    (
        "coupled, standard, block",
        "chain, deterministic",
        "p(x)",
        "one-hot q",
        True,
        _enumerated(exact_rejection, _top_chain),
    ),
    (
        "coupled, standard",
        "tree, deterministic",
        "p(S)",
        "SpecInfer 2305.09781",
        True,
        _enumerated(exact_rejection, _top_tree),
    ),
    (
        "standard",
        "chain, drawn",
        "sum_x min(p, q)",
        "Leviathan et al. 2211.17192, alg. 1",
        True,
        _enumerated(exact_rejection, lambda each: drawn_chain(_law(each.q), DEPTH)),
    ),
    (
        "standard",
        "tree, with replacement",
        "recursive, q_i = q",
        "SpecInfer 2305.09781",
        True,
        _enumerated(exact_rejection, _tree(with_replacement)),
    ),
    (
        "standard",
        "tree, without replacement",
        "recursive, q_i = q less those before",
        "Jeon et al. 2402.14160; Sequoia 2402.12374",
        True,
        _enumerated(exact_rejection, _tree(without_replacement)),
    ),
    (
        "standard",
        "tree, top n - 1 and one drawn",
        "p(T) + sum_(x not in T) min(p, q')",
        "Hu et al. 2502.18779",
        True,
        _enumerated(exact_rejection, _tree(top_and_one)),
    ),
    (
        "block",
        "chain, drawn",
        "the block as a whole",
        "Sun et al. 2403.10444, alg. 2",
        True,
        _enumerated(exact_block, lambda each: drawn_chain(_law(each.q), DEPTH)),
    ),
    (
        "(limit)",
        "chain, drawn",
        "sum over prefixes of min(P, Q)",
        "Sun et al. 2403.10444",
        True,
        lambda each: prefix_bound(_law(each.p), _law(each.q), DEPTH),
    ),
    (
        "typical",
        "chain, drawn",
        "1 if p(x) > min(0.09, 0.3 exp(-H))",
        "Medusa 2401.10774, sec. 2.3.1",
        False,
        _enumerated(_typical, lambda each: drawn_chain(_law(each.q), DEPTH)),
    ),
)
