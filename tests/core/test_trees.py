"""Topologies: depths, children, paths and ancestors agree with a plain walk over the parents."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foredraft.core.trees import ROOT, topology


@st.composite
def parent_lists(draw: st.DrawFn) -> tuple[int, ...]:
    size = draw(st.integers(0, 12))
    return tuple(draw(st.integers(-1, node - 1)) for node in range(size))


@given(parent_lists())
def test_everything_follows_from_the_parents(parents: tuple[int, ...]) -> None:
    tree = topology(parents)
    assert len(tree) == len(parents)
    for node in range(len(parents)):
        walk = [node]
        while parents[walk[0]] != ROOT:
            walk.insert(0, parents[walk[0]])
        assert tree.path(node) == tuple(walk)
        assert tree.depths[node] == len(walk)
        assert {j for j in range(len(parents)) if tree.ancestors[node, j]} == set(walk)
    for node in range(-1, len(parents)):
        children = tuple(child for child, parent in enumerate(parents) if parent == node)
        assert tree.children(node) == children
    assert tree.is_chain == (parents == tuple(range(-1, len(parents) - 1)))
    assert tree.max_depth == max(tree.depths, default=0)


def test_the_root_has_an_empty_path() -> None:
    assert topology((-1, 0)).path(ROOT) == ()
    assert topology(()).children(ROOT) == ()


def test_a_shape_is_compiled_once() -> None:
    assert topology((-1, 0, 0)) is topology((-1, 0, 0))


@pytest.mark.parametrize("parents", [(0,), (-1, 1), (-2,), (-1, 0, 3)])
def test_a_parent_must_come_before_its_child(parents: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=f"parent {parents[-1]}"):
        topology(parents)
