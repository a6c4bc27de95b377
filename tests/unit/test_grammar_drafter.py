"""The drafter of forced tokens by itself."""

from __future__ import annotations

import pytest

from foredraft.core.errors import ConfigError
from foredraft.core.structured_outputs import StructuredOutputs
from foredraft.drafters.catalog import build_drafter
from foredraft.drafters.grammar import GrammarDrafter
from foredraft.drafters.interface import Draft
from foredraft.grammar.compiler import compiler_of
from foredraft.testing import draft_request
from foredraft.testing.models import tiny_tokenizer


def test_it_drafts_what_is_forced_for_certain() -> None:
    tokenizer = tiny_tokenizer(32)
    compiler = compiler_of(tokenizer, 32)
    matcher = compiler.compile(StructuredOutputs(regex="abcd[xy]z")).matcher([1])
    request = draft_request([5, 6], vocab_size=32, max_nodes=3)._replace(matcher=matcher)
    draft = build_drafter("grammar").drafter.propose([request])[0]
    assert list(draft.tokens) == tokenizer.encode("abc")
    assert list(draft.confidence or ()) == [1.0, 1.0, 1.0]
    draft = GrammarDrafter().propose([request._replace(max_nodes=8)])[0]
    assert list(draft.tokens) == tokenizer.encode("abcd")
    assert matcher.num_tokens == 0


def test_without_a_grammar_there_is_nothing_to_draft() -> None:
    request = draft_request([5, 6], vocab_size=32)
    assert GrammarDrafter().propose([request]) == [Draft()]


def test_lengths_are_checked() -> None:
    with pytest.raises(ConfigError, match="integer of 1 or more, got 0"):
        GrammarDrafter(0)
