"""Many samples of the first tokens at one place, made by the engine.

Knows how to run an LLM many times on one prompt, with passes remembered or computed; knows no
expected law and no test.
"""

from __future__ import annotations

import copy
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from foredraft.bench.certificate.cells import RANK_CELLS, Ranks
from foredraft.bench.certificate.remember import RememberedLayers, RememberedModel
from foredraft.core.coins import mix
from foredraft.core.errors import ModelError
from foredraft.core.sampling import SamplingParams
from foredraft.drafters.draft_model import DraftModelDrafter
from foredraft.drafters.early_exit import EarlyExitDrafter
from foredraft.drafters.interface import Draft, Drafter, DraftRequest, StepResult, StepRow
from foredraft.engine.llm import LLM
from foredraft.engine.memory import choose_cache_dtype
from foredraft.engine.outputs import RequestOutput
from foredraft.kernels.interface import Segment
from foredraft.models.decoder import new_cache
from foredraft.models.interface import FlatBatch
from foredraft.models.load import LoadedModel
from foredraft.testing.wrapping_drafters import WrappingDrafter

GROUP = 512  # draws that are one request's completions; all of those made with every pass computed
MOST_CLAIMS = 256  # laws of drafts that are kept, 50 MB for a vocabulary of 49,152
MOST_LAWS = 64  # of which the ranks are kept
AT_ONCE = 16  # requests in the engine together: more rows than fit a CPU cache cost more

Sequences = list[tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Setting:
    """A way of sampling as users have it, and how far it is tested."""

    name: str
    temperature: float
    top_k: int = 0
    top_p: float = 1.0
    width: int = 1  # draft tokens a step at most
    length: int = 2  # tokens that are drawn
    variation: float = 0.02  # total variation of a law that the draws must reveal

    def params(self, seed: int, n: int, max_tokens: int | None = None) -> SamplingParams:
        """The parameters of a request for `n` completions."""
        return SamplingParams(
            n=n,
            max_tokens=self.length if max_tokens is None else max_tokens,
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            ignore_eos=True,
            seed=seed,
        )


@dataclass(frozen=True, slots=True)
class Pair:
    """What is certified: a target, its drafter, and the rule between them."""

    target: LoadedModel
    drafter: Drafter
    num_speculative_tokens: int
    rule: str  # rejection_sample_method
    engine: Mapping[str, Any] = field(default_factory=dict)  # kv_dtype, max_model_len

    @property
    def max_model_len(self) -> int:
        """Positions that a prompt and its answer may take."""
        given: int | None = self.engine.get("max_model_len")
        return given or self.target.config.max_position_embeddings

    def llm(self, width: int, drafter: Drafter | None = None, **sizes: Any) -> LLM:
        """An engine with this pair, or with another drafter in its place."""
        config = {"num_speculative_tokens": width, "rejection_sample_method": self.rule}
        return LLM(
            self.target,
            drafter=self.drafter if drafter is None else drafter,
            speculative_config=config,
            **{**self.engine, **sizes},
        )

    @property
    def same_bits(self) -> bool:
        """Whether a row is the same to the bit in any company."""
        return self.target.model.kernels.name == "native"

    @property
    def same_tokens(self) -> bool:
        """Whether it is near enough for every token to be the same."""
        return self.same_bits or self.target.dtype == torch.float64

    def _told_of(self, base: Sequence[int]) -> Drafter:
        """The drafter; one that reads features is told of those before `base`'s last token."""
        if not self.drafter.capabilities.feature_layers or len(base) < 2:
            return self.drafter
        return _ToldOfBase(self.drafter, self.target, base)

    def computing(self, base: Sequence[int]) -> Pair:
        """The same pair for contexts that start with `base`."""
        return replace(self, drafter=self._told_of(base))

    def remembering(self, base: Sequence[int]) -> tuple[Pair, RememberedModel]:
        """The same pair for contexts that start with `base`, each row computed once; the target."""
        kv_dtype = self.engine.get("kv_dtype", "auto")
        dtype = choose_cache_dtype(kv_dtype, self.target)
        drafter = self._told_of(base)
        rows = RememberedModel(self.target, base, dtype, drafter.capabilities.feature_layers)
        if isinstance(drafter, EarlyExitDrafter):
            layer = drafter.capabilities.target_layers
            drafter = copy.copy(drafter)
            drafter.first_layers = RememberedLayers(self.target, layer, base, dtype)
        if isinstance(drafter, DraftModelDrafter):
            drafter = copy.copy(drafter)
            own = choose_cache_dtype(kv_dtype, drafter.loaded)
            drafter.loaded = replace(
                drafter.loaded, model=RememberedModel(drafter.loaded, base, own)
            )
        target = replace(self.target, model=rows)
        return replace(self, target=target, drafter=drafter, engine={}), rows


@dataclass(slots=True)
class Draws:
    """What was drawn at one place, and how it came about."""

    sequences: Sequences = field(default_factory=list)
    # [width][RANK_CELLS] of draft tokens, by rank in the law that the drafter claims
    draft_ranks: list[list[int]] = field(default_factory=list)
    # What the drafter claimed after some suffixes of the base: a law `[V]`, or its one token.
    claims: Mapping[tuple[int, ...], Tensor | int] = field(default_factory=dict)
    accepted: Counter[int] = field(default_factory=Counter)  # drafts with exactly j accepted

    @property
    def tokens(self) -> Counter[int]:
        """How often each token came first."""
        return Counter(sequence[0] for sequence in self.sequences)


class _ToldOfBase(WrappingDrafter):
    """A drafter that is told of the target's features before a request's first draft.

    A request's first row is that of its prompt's last token: the rows before it, which its sibling
    computed, are told of here, so that drafts begin where the draws do.
    """

    def __init__(self, inner: Drafter, target: LoadedModel, base: Sequence[int]) -> None:
        super().__init__(inner)
        self._base = tuple(base)
        before = len(base) - 2
        self._row = StepRow(before, -1, self._base[before], True)
        cache = new_cache(target.config, 1, before + 1, target.cache_dtype, target.device)
        segment = Segment(0, before + 1, (), [0])
        depths = inner.capabilities.feature_layers
        batch = FlatBatch(self._base[:-1], [segment], [before], feature_layers=depths)
        features = target.model.run(batch, cache).features
        self._features = None if features is None else features[before:]

    def propose(self, requests: Sequence[DraftRequest]) -> Sequence[Draft]:
        """... where the cache is filled up to there, if there is one."""
        first = [
            each
            for each in requests
            if len(each.tokens) == len(self._base)
            and each.num_computed == len(self._base) - 1
            and (each.cache is None or each.num_cached >= len(self._base) - 2)
        ]
        self.inner.observe(
            [
                StepResult(each.id, [self._row], 0, self._base[-1], features=self._features)
                for each in first
            ]
        )
        return super().propose(requests)


class DraftWatcher(WrappingDrafter):
    """Keeps the laws that drafts claim, and ranks each request's first draft tokens in them."""

    def __init__(self, inner: Drafter, base_length: int, seed: int) -> None:
        super().__init__(inner)
        self._base_length = base_length
        self._generator = torch.Generator().manual_seed(seed)
        self.ranks: list[list[int]] = []
        self.claims: dict[tuple[int, ...], Tensor | int] = {}
        self._laws: OrderedDict[tuple[int, ...], tuple[Tensor, Ranks]] = OrderedDict()

    def propose(self, requests: Sequence[DraftRequest]) -> Sequence[Draft]:
        drafts = super().propose(requests)
        for request, draft in zip(requests, drafts, strict=True):
            suffix = tuple(request.tokens[self._base_length :])
            is_chain = tuple(draft.parents) == tuple(range(-1, len(draft.tokens) - 1))
            if is_chain and (draft.verify is None or all(draft.verify)):
                self._keep(suffix, draft)
            if draft.probs is not None and not suffix:
                self._rank(draft.tokens, draft.probs)
        return drafts

    def _keep(self, suffix: tuple[int, ...], draft: Draft) -> None:
        for i, token in enumerate(draft.tokens):
            context = (*suffix, *draft.tokens[:i])
            if len(self.claims) < MOST_CLAIMS and context not in self.claims:
                probs = draft.probs
                self.claims[context] = token if probs is None else probs[i].float().cpu()

    def _rank(self, tokens: Sequence[int], laws: Tensor) -> None:
        shares = torch.rand(len(tokens), generator=self._generator).tolist()
        for i, (token, law, share) in enumerate(zip(tokens, laws, shares, strict=True)):
            if i == len(self.ranks):
                self.ranks.append([0] * RANK_CELLS)
            # A token that its own law never draws counts as the last of all.
            above, mass = self._ranked(tuple(tokens[:i]), law).interval(token) or (1.0, 0.0)
            self.ranks[i][rank_cell(above + share * mass)] += 1

    def _ranked(self, drafted: tuple[int, ...], law: Tensor) -> Ranks:
        """The ranks of a law, which is nearly always that of the last draft that began alike."""
        known = self._laws.get(drafted)
        if known is None or not torch.equal(known[0], law):
            known = self._laws[drafted] = (law.clone(), Ranks(law))
        self._laws.move_to_end(drafted)
        if len(self._laws) > MOST_LAWS:
            self._laws.popitem(last=False)
        return known[1]


def rank_cell(rank: float, cells: int = RANK_CELLS) -> int:
    """Which of `cells` equal parts of (0, 1) holds `rank`; rounding may give exactly 1."""
    return min(int(rank * cells), cells - 1)


def draw_remembered(
    pair: Pair,
    base: Sequence[int],
    setting: Setting,
    count: int,
    seed: int,
    progress: Callable[[int, int], None],
) -> Draws:
    """`count` sequences after `base` with the pair of `pair.remembering(base)`."""
    watcher = DraftWatcher(pair.drafter, len(base), mix(seed, 1) >> 1)
    llm = pair.llm(
        setting.width,
        watcher,
        max_model_len=len(base) + setting.length,
        page_size=_base_page(base),
        max_num_seqs=AT_ONCE,
        max_num_batched_tokens=AT_ONCE * (setting.width + 1) + len(base),
    )
    with _one_torch_thread():
        draws = _draw(llm, base, setting, count, seed, progress)
    draws.draft_ranks, draws.claims = watcher.ranks, watcher.claims
    return draws


def draw_computed(
    pair: Pair,
    base: Sequence[int],
    setting: Setting,
    count: int,
    seed: int,
    progress: Callable[[int, int], None],
) -> Draws:
    """The same draws end to end: every pass is computed, nothing is remembered."""
    # Where features are read a first draft depends on what is shared: the same pages as there.
    reads = bool(pair.drafter.capabilities.feature_layers)
    sizes: dict[str, Any] = {"page_size": _base_page(base)} if reads else {}
    llm = pair.computing(base).llm(setting.width, **sizes)
    return _draw(llm, base, setting, count, seed, progress)


def _base_page(base: Sequence[int]) -> int:
    """One page for all of the prompt but its last token: completions share it, none copies it."""
    return max(1, len(base) - 1)


@contextmanager
def _one_torch_thread() -> Iterator[None]:
    """The draws are millions of short operations, for which threads would wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _draw(
    llm: LLM,
    base: Sequence[int],
    setting: Setting,
    count: int,
    seed: int,
    progress: Callable[[int, int], None],
) -> Draws:
    draws = Draws()
    for group in range(-(-count // GROUP)):
        size = min(GROUP, count - len(draws.sequences))
        params = setting.params(mix(seed, group + 2), size)
        outputs = llm.generate([list(base)], params)
        check_finished(outputs)
        for completion in outputs[0].outputs:
            draws.sequences.append(tuple(completion.token_ids))
            assert completion.metrics is not None  # every completion of the engine has them
            histogram = completion.metrics.speculative_decoding.acceptance_histogram
            draws.accepted.update(dict(enumerate(histogram)))
        progress(len(draws.sequences), count)
    return draws


def check_finished(outputs: Sequence[RequestOutput]) -> None:
    """Raise ModelError, with its reason, for an output that ended in an error: bad logits."""
    for output in outputs:
        for completion in output.outputs:
            if completion.error is not None:
                raise ModelError(f"nothing can be certified: {completion.error}")
