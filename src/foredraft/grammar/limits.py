"""What a grammar may cost, in llguidance's own measures.

Knows llguidance alone: the process that tries a grammar imports it, so it must start fast.
"""

from __future__ import annotations

from llguidance import LLParserLimits

# Steps of building regular expressions: an expression whose counts multiply is refused within some
# 50 ms instead of 500.
INITIAL_LEXER_FUEL = 200_000
MAX_GRAMMAR_SIZE = 200_000  # symbols in productions


def parser_limits() -> LLParserLimits:
    """Of a grammar's construction and of each of its masks."""
    return LLParserLimits(
        initial_lexer_fuel=INITIAL_LEXER_FUEL,
        max_grammar_size=MAX_GRAMMAR_SIZE,
        verbose_errors=False,
    )
