"""Does `foredraft certify` fail where something is wrong? Plants faults in the engine, and looks.

    python benchmarks/certify_faults.py smollm2-135m DRAFT_MODEL --output FILE

Runs the certificate's laws, with its default settings, on n-gram lookup and on a sampled draft
model: once as they are, and once with each fault. Writes what failed and by how much; exit code 1
unless exactly the faulty ones fail.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from foredraft.bench.certificate.check import judge
from foredraft.bench.certificate.draws import Pair
from foredraft.bench.certificate.law import LawSettings, check_laws
from foredraft.bench.certificate.prompts import PROMPTS
from foredraft.bench.decode import prompt_ids
from foredraft.bench.provenance import provenance
from foredraft.core import coins, rejection
from foredraft.drafters.catalog import build_drafter
from foredraft.drafters.draft_model import DraftModelDrafter
from foredraft.drafters.interface import Draft, DraftRequest
from foredraft.models.load import load_model

CLAIMED_POWER = 0.8  # of the law that is claimed, of the one that was drawn from
NUM_TOKENS = 4
FAMILY_ERROR = 1e-3


class HotDrafter(DraftModelDrafter):
    """Draws its drafts from one law and claims another, at a higher temperature."""

    def propose(self, requests: Sequence[DraftRequest]) -> Sequence[Draft]:
        return [self._claim(draft) for draft in super().propose(requests)]

    def _claim(self, draft: Draft) -> Draft:
        if draft.probs is None:
            return draft
        hot = draft.probs**CLAIMED_POWER
        return replace(draft, probs=hot / hot.sum(dim=1, keepdim=True))


@contextmanager
def _as_it_is() -> Iterator[None]:
    yield


@contextmanager
def _no_residual() -> Iterator[None]:
    exact = rejection.residual
    rejection.residual = lambda weights, *_: weights.clone()
    try:
        yield
    finally:
        rejection.residual = exact


@contextmanager
def _reused(stream: str, other: str) -> Iterator[None]:
    """The coins of one stream are those of another."""
    own = getattr(coins, stream)
    setattr(coins, stream, getattr(coins, other))
    try:
        yield
    finally:
        setattr(coins, stream, own)


def main() -> None:
    arguments = _arguments()
    loaded = load_model(arguments.model, num_threads=arguments.threads)
    prompts = prompt_ids(loaded, PROMPTS, None)
    ngram = Pair(loaded, build_drafter("ngram", {}, loaded).drafter, NUM_TOKENS, "standard")
    built = build_drafter("draft_model", {"model": arguments.draft_model}, loaded).drafter
    assert isinstance(built, DraftModelDrafter)
    model = replace(ngram, drafter=built)
    hot = replace(ngram, drafter=HotDrafter(built.loaded, loaded))
    cases: list[tuple[str, str, Pair, Callable[[], Any], bool]] = [
        ("n-gram", "none", ngram, _as_it_is, True),
        ("n-gram", "no residual", ngram, _no_residual, False),
        ("n-gram", "coins reused", ngram, lambda: _reused("RESIDUAL", "ACCEPT"), False),
        ("draft_model", "none", model, _as_it_is, True),
        ("draft_model", "no residual", model, _no_residual, False),
        ("draft_model", "draft law at another temperature", hot, _as_it_is, False),
        ("draft_model", "coins reused", model, lambda: _reused("ACCEPT", "DRAFT"), False),
    ]
    results = []
    for drafter, fault, pair, plant, passes in cases:
        with plant():
            results.append(_run(drafter, fault, pair, prompts) | {"should_pass": passes})
        print(json.dumps(results[-1]), flush=True)
    document = {**provenance(), "model": loaded.name, "faults": results}
    arguments.output.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    if any(each["passed"] != each["should_pass"] for each in results):
        sys.exit(1)


def _run(drafter: str, fault: str, pair: Pair, prompts: Any) -> dict[str, Any]:
    begin = time.perf_counter()
    result = check_laws(pair, prompts, LawSettings(), lambda *_: None)
    checks = [*judge(result.tests, FAMILY_ERROR), *result.checks]
    p_values = [check.p_value for check in checks if check.p_value is not None]
    return {
        "drafter": drafter,
        "fault": fault,
        "passed": all(check.passed for check in checks),
        "failed_checks": [check.name for check in checks if not check.passed],
        "num_checks": len(checks),
        "smallest_p_value": min(p_values),
        "seconds": round(time.perf_counter() - begin, 1),
    }


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("draft_model", help="a directory, such as the target's first layers")
    parser.add_argument("--output", type=Path, required=True, metavar="FILE")
    parser.add_argument("--threads", type=int, default=None)
    return parser.parse_args()


if __name__ == "__main__":
    main()
