"""How often does `foredraft certify` catch a rule that is off by a total variation of 0.02?

    python benchmarks/certify_power.py smollm2-135m '{"method": "ngram"}' --output FILE

Plants the rule in the engine: after a rejection it forgets the residual, in as many cases as make
the law of the first token differ by exactly that much, on a prompt of the certificate's own, with
its default number of draws. Prints the power computed beforehand, the share of 10,000 certificates
that catch it by counts drawn from that law, and the share of whole ones, drawn by the engine.
"""

from __future__ import annotations

import argparse
import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from foredraft.bench.certificate.chi_square import critical_value, divergence, power
from foredraft.bench.certificate.draws import Pair
from foredraft.bench.certificate.law import LawSettings, Plan, draw_at, first_token, plan_laws
from foredraft.bench.certificate.mutant_laws import mutant_laws
from foredraft.bench.certificate.prompts import PROMPTS
from foredraft.bench.decode import prompt_ids
from foredraft.bench.provenance import provenance
from foredraft.core import rejection
from foredraft.core.coins import mix
from foredraft.drafters.catalog import build_drafter
from foredraft.engine.config import SpeculativeConfig
from foredraft.models.load import load_model

SIMULATED = 10_000


def main() -> None:
    arguments = _arguments()
    loaded = load_model(arguments.model, num_threads=arguments.threads)
    config = SpeculativeConfig.from_mapping(json.loads(arguments.speculative_config))
    built = build_drafter(config.method, config.options, loaded)
    pair = Pair(loaded, built.drafter, built.num_speculative_tokens, "standard")
    plan = plan_laws(pair, prompt_ids(loaded, PROMPTS, None), LawSettings(), lambda *_: None)
    share = _share_for(plan, arguments.variation)
    figures = _predict(plan, share)
    _plant(share)
    replay, _ = pair.remembering(plan.places[0].site.base)
    caught = 0
    for run in range(arguments.runs):
        place = replace(plan.places[0], seed=mix(run, 1))
        test = first_token(draw_at(replay, place, lambda *_: None), plan.level)
        caught += test.p_value <= plan.level
        print(
            f"run {run + 1}: statistic {test.statistic:.1f}, p {test.p_value:.2g}; {caught} caught",
            flush=True,
        )
    figures |= {"certificates": arguments.runs, "caught": caught}
    if arguments.output is not None:
        document = {**provenance(), "model": loaded.name, **figures}
        document["speculative_config"] = json.loads(arguments.speculative_config)
        arguments.output.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def _mutant(plan: Plan) -> Tensor:
    site, setting = plan.places[0].site, plan.places[0].setting
    laws = mutant_laws(
        site.target_probs, site.draft_probs, setting.temperature, sampled=site.sampled
    )
    return laws["no residual"]


def _variation(law: Tensor, other: Tensor) -> float:
    return float((law - other).abs().sum()) / 2.0


def _share_for(plan: Plan, variation: float) -> float:
    """Of the rejections, how many forget the residual."""
    whole = _variation(_mutant(plan), plan.places[0].site.target_probs)
    if whole < variation:
        raise SystemExit(f"without any residual the law is off by {whole:.4f} only")
    return variation / whole


def _predict(plan: Plan, share: float) -> dict[str, Any]:
    """What is caught by computation, and by counts drawn from the law itself."""
    place, site = plan.places[0], plan.places[0].site
    law = torch.lerp(site.target_probs, _mutant(plan), share)
    cells, expected = site.cells.law(law), site.cells.probs
    df = site.cells.num_possible - 1
    print(
        f"{site.prompt_id!r}, position {len(site.base)}, {df + 1} cells, {place.num_draws} draws, "
        f"level {plan.level:.2g}: the residual is forgotten in {share:.1%} of rejections"
    )
    stated = power(df, place.num_draws * divergence(cells, expected), plan.level)
    print(
        f"total variation {_variation(law, site.target_probs):.4f}, between the cells "
        f"{_variation(cells, expected):.4f}; computed power {stated:.4f}"
    )
    possible = (expected > 0).numpy()
    probs = cells.numpy()[possible] / cells.numpy()[possible].sum()
    counts = np.random.default_rng(0).multinomial(place.num_draws, probs, SIMULATED)
    means = expected.numpy()[possible] * place.num_draws
    statistics = ((counts - means) ** 2 / means).sum(axis=1)
    caught = float((statistics >= critical_value(df, plan.level)).mean())
    print(f"caught by {caught:.4f} of {SIMULATED} certificates with counts of this law")
    return {
        "total_variation": round(_variation(law, site.target_probs), 4),
        "draws": place.num_draws,
        "level": plan.level,
        "computed_power": round(stated, 4),
        "caught_of_simulated_counts": round(caught, 4),
        "simulated": SIMULATED,
    }


def _plant(share: float) -> None:
    exact = rejection.residual
    generator = random.Random(0)

    def forgetful(
        weights: Tensor, token: int, draft_probs: Tensor | None, total: float = 1.0
    ) -> Tensor:
        if generator.random() < share:
            return weights.clone()
        return exact(weights, token, draft_probs, total)

    rejection.residual = forgetful


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("speculative_config")
    parser.add_argument("--variation", type=float, default=0.02)
    parser.add_argument("--runs", type=int, default=20, help="whole certificates")
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--output", type=Path, default=None, metavar="FILE")
    return parser.parse_args()


if __name__ == "__main__":
    main()
