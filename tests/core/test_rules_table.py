"""The table of rules: what it says follows from the rules, and docs/rules.md holds it."""

from __future__ import annotations

from pathlib import Path

import pytest

from foredraft.testing.closed_forms import chain_tokens, siblings_acceptance
from foredraft.testing.rules import BRANCHING, DEPTH, EXAMPLES, RuleEntry, as_markdown, rules_table
from foredraft.testing.siblings import top_and_one, with_replacement, without_replacement

DOCS = Path(__file__).parents[2] / "docs" / "rules.md"


@pytest.fixture(scope="module")
def table() -> list[RuleEntry]:
    return rules_table()


def line(table: list[RuleEntry], method: str, draft: str) -> RuleEntry:
    (found,) = (entry for entry in table if (entry.method, entry.draft) == (method, draft))
    return found


def test_the_docs_hold_the_table(table: list[RuleEntry]) -> None:
    assert as_markdown(table) in DOCS.read_text()


def test_expected_tokens_are_those_of_closed_forms(table: list[RuleEntry]) -> None:
    trees = {
        "tree, with replacement": with_replacement,
        "tree, without replacement": without_replacement,
        "tree, top n - 1 and one drawn": top_and_one,
    }
    for i, example in enumerate(EXAMPLES):
        p, q = example.p, example.q
        chain = chain_tokens(lambda prefix, p=p: p, lambda prefix, q=q: q, DEPTH)
        assert line(table, "standard", "chain, drawn").tokens[i] == pytest.approx(chain)
        for name, siblings in trees.items():
            accepted = siblings_acceptance(p, q, BRANCHING[0], siblings)
            expected = sum(accepted**level for level in range(DEPTH + 1))
            assert line(table, "standard", name).tokens[i] == pytest.approx(expected)
        fixed = sum(float(p[q.argmax()]) ** level for level in range(DEPTH + 1))
        entry = line(table, "coupled, standard, block", "chain, deterministic")
        assert entry.tokens[i] == pytest.approx(fixed)


def test_the_order_of_the_rules(table: list[RuleEntry]) -> None:
    """Coupled <= standard <= block <= limit; with <= without replacement <= top and one."""
    ordered = [
        [
            line(table, "coupled", "chain, drawn with the target's noise"),
            line(table, "standard", "chain, drawn"),
            line(table, "block", "chain, drawn"),
            line(table, "(limit)", "chain, drawn"),
        ],
        [
            line(table, "standard", "chain, drawn"),
            line(table, "standard", "tree, with replacement"),
            line(table, "standard", "tree, without replacement"),
            line(table, "standard", "tree, top n - 1 and one drawn"),
        ],
    ]
    for entries in ordered:
        for i in range(len(EXAMPLES)):
            tokens = [entry.tokens[i] for entry in entries]
            assert tokens == sorted(tokens)


def test_only_typical_is_lossy_in_the_table(table: list[RuleEntry]) -> None:
    assert [entry.method for entry in table if not entry.exact] == ["typical"]
