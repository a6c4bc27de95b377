"""One line of a certificate, and tests whose errors are controlled together.

Knows names and numbers; knows nothing of what was run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from foredraft.bench.certificate.chi_square import holm


@dataclass(frozen=True, slots=True)
class Check:
    """What was checked and what came out. No p-value: the check is exact."""

    name: str
    passed: bool
    statistic: float | None
    p_value: float | None
    detail: str


@dataclass(frozen=True, slots=True)
class LawTest:
    """A chi-square test that has been made and not been judged yet."""

    name: str
    statistic: float
    df: int
    p_value: float
    detail: str


def judge(tests: Sequence[LawTest], family_error: float) -> list[Check]:
    """The tests as checks: all of them together fail a true law with P <= `family_error` (Holm)."""
    adjusted = holm([test.p_value for test in tests])
    return [
        Check(
            test.name,
            value > family_error,
            test.statistic,
            test.p_value,
            f"{test.detail}; {test.df} degrees of freedom, adjusted p {value:.2g}",
        )
        for test, value in zip(tests, adjusted, strict=True)
    ]
