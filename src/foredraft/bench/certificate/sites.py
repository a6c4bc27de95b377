"""Where to test: a place in a text at which wrong rules would be seen best, chosen beforehand.

Knows laws of target and drafter along a text; knows no draws of the test. Choosing by the laws
alone leaves the test's error rates as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from foredraft.bench.certificate.cells import Cells, pool
from foredraft.bench.certificate.chi_square import divergence
from foredraft.bench.certificate.draws import Pair, Setting
from foredraft.bench.certificate.mutant_laws import mutant_laws
from foredraft.drafters.interface import Draft, Drafter, DraftRequest
from foredraft.testing.wrapping_drafters import WrappingDrafter

SCOUTED_TOKENS = 24  # of each prompt's continuation
MOST_CONTEXTS = 1500  # tokens that the draws may be expected to show: a pass of the target each
INVISIBLE = 1e-6  # divergence of a mistake that makes no difference at a site
# The target's nucleus is taken this much wider than asked, so that a sum rounded elsewhere never
# makes a drawn token impossible.
NUCLEUS_TOLERANCE = 1e-5


@dataclass(frozen=True, slots=True)
class Mutant:
    """A mistake as it would show in the first token at a site."""

    name: str
    total_variation: float
    divergence: float  # noncentrality of one draw, between the cells


@dataclass(frozen=True, slots=True)
class Site:
    """A context, and the laws of target and drafter for the token after it."""

    prompt_id: str
    base: tuple[int, ...]
    target_probs: Tensor  # [V] float64
    draft_probs: Tensor  # [V] float64; one-hot where the draft is not `sampled`
    cells: Cells
    sampled: bool
    mutants: tuple[Mutant, ...]  # the visible ones, the nearest first

    def rank(self, variation: float, draws: int) -> tuple[bool, int, float]:
        """Higher is better: few contexts, then mutants that are seen for sure, then the nearest.

        Draws that reveal a total variation reveal every divergence of `(2 variation)^2`.
        """
        few = self.expected_contexts(draws) <= MOST_CONTEXTS
        divergences = [mutant.divergence for mutant in self.mutants]
        seen = sum(each >= (2.0 * variation) ** 2 for each in divergences)
        return few, seen, min(divergences, default=0.0)

    def expected_contexts(self, draws: int) -> float:
        """How many different tokens so many draws are expected to show."""
        return float((1.0 - torch.exp(-draws * self.target_probs)).sum())


def target_law(logits: Tensor, setting: Setting) -> Tensor:
    """`[V]` float64: the law a setting asks for, by its definition and not by the sampler's code.

    Temperature, then the `top_k` likeliest, then of those the shortest likeliest-first prefix that
    reaches `top_p`; ties go to the lowest id.
    """
    probs = torch.softmax(logits.double() / setting.temperature, dim=-1)
    if not setting.top_k and setting.top_p == 1.0:
        return probs
    order = torch.argsort(probs, descending=True, stable=True)
    if setting.top_k:
        order = order[: setting.top_k]
    if setting.top_p < 1.0:
        running = torch.cumsum(probs[order] / probs[order].sum(), dim=0)
        wanted = setting.top_p + NUCLEUS_TOLERANCE
        order = order[: int(torch.searchsorted(running, wanted)) + 1]
    law = torch.zeros_like(probs)
    law[order] = probs[order] / probs[order].sum()
    return law


def best_site(
    pair: Pair,
    prompts: Mapping[str, Sequence[int]],
    setting: Setting,
    draws: int,
    seed: int,
    progress: Callable[[int, int], None],
) -> Site | None:
    """The site of the highest rank in the continuations of all prompts.

    None where the drafter drafts nothing, or the target has one thing to say, everywhere.
    """
    sites: list[Site] = []
    for done, (prompt_id, prompt) in enumerate(prompts.items()):
        sites += _scout(pair, prompt_id, prompt, setting, seed)
        progress(done + 1, len(prompts))
    return max(sites, key=lambda site: site.rank(setting.variation, draws), default=None)


class _Scout(WrappingDrafter):
    """Keeps the context and the first law of each draft that is not empty."""

    def __init__(self, inner: Drafter, vocab_size: int) -> None:
        super().__init__(inner)
        self._vocab_size = vocab_size
        self.laws: dict[tuple[int, ...], tuple[Tensor, bool]] = {}  # [V], and if it was sampled

    def propose(self, requests: Sequence[DraftRequest]) -> Sequence[Draft]:
        drafts = super().propose(requests)
        for request, draft in zip(requests, drafts, strict=True):
            if not draft.tokens:
                continue
            if draft.probs is None:
                law = torch.zeros(self._vocab_size, dtype=torch.float64)
                law[draft.tokens[0]] = 1.0
            else:
                law = draft.probs[0].to("cpu", torch.float64, copy=True)
            self.laws[tuple(request.tokens)] = (law, draft.probs is not None)
        return drafts


def _scout(
    pair: Pair, prompt_id: str, prompt: Sequence[int], setting: Setting, seed: int
) -> list[Site]:
    """The sites of one text, which the pair writes itself with one draft token a step."""
    scout = _Scout(pair.drafter, pair.target.config.vocab_size)
    rows: dict[int, Tensor] = {}

    def tap(_request_id: str, position: int, _token: int, row: Tensor) -> None:
        rows[position] = row.to("cpu", copy=True)

    pair.llm(1, scout, tap=tap).generate([list(prompt)], setting.params(seed, 1, SCOUTED_TOKENS))
    sites = []
    longest = pair.max_model_len - setting.length
    for context, (draft_probs, sampled) in scout.laws.items():
        if len(context) > longest:
            continue
        probs = target_law(rows[len(context)], setting)
        sites.append(_site(prompt_id, context, probs, draft_probs, setting, sampled))
    return [site for site in sites if site.cells.num_possible > 1]


def _site(
    prompt_id: str,
    base: tuple[int, ...],
    target_probs: Tensor,
    draft_probs: Tensor,
    setting: Setting,
    sampled: bool,
) -> Site:
    cells = pool(target_probs, draft_probs)
    mutants = []
    laws = mutant_laws(target_probs, draft_probs, setting.temperature, sampled=sampled)
    for name, law in laws.items():
        distance = divergence(cells.law(law), cells.probs)
        if distance > INVISIBLE:
            variation = float((law - target_probs).abs().sum()) / 2.0
            mutants.append(Mutant(name, variation, distance))
    nearest_first = tuple(sorted(mutants, key=lambda mutant: mutant.divergence))
    return Site(prompt_id, base, target_probs, draft_probs, cells, sampled, nearest_first)
