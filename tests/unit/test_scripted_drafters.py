"""The scripted drafters do what their script says, in every rule."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from scipy.stats import chisquare
from torch import Tensor

from foredraft.core import coins
from foredraft.core.row_math import TorchRowMath
from foredraft.core.sampling import Sampler, SamplingParams
from foredraft.core.trees import topology
from foredraft.drafters.interface import Capabilities, Draft, Drafter, DraftRequest, StepResult
from foredraft.testing.drafters import (
    EmptyDrafter,
    FixedDrafter,
    LiarDrafter,
    OracleDrafter,
    RaisingDrafter,
    RecordingDrafter,
    RepeatDrafter,
    RoutingDrafter,
    SelfDrafter,
    SkewedDrafter,
    TreeDrafter,
    WrongAtDrafter,
    merge_chains,
)
from foredraft.testing.requests import draft_request

V = 6
PROMPT = (1, 2)
OUTPUT = (3, 0, 5, 4, 1)
END_IDS = frozenset({1})


def request(
    output: Sequence[int] = (),
    max_nodes: int = 4,
    seed: int = 7,
    coupled: bool = False,
    prompt: Sequence[int] = PROMPT,
    name: str = "r",
    **sampling: Any,
) -> DraftRequest:
    return draft_request(
        [*prompt, *output],
        len(prompt),
        vocab_size=V,
        max_nodes=max_nodes,
        sampling=SamplingParams(**sampling),
        seed=seed,
        coupled=coupled,
        name=name,
        end_token_ids=END_IDS | set(sampling.get("stop_token_ids", ())),
    )


def draft(drafter: Drafter, asked: DraftRequest) -> Draft:
    (made,) = drafter.propose([asked])
    return made


def tokens(drafter: Drafter, asked: DraftRequest) -> list[int]:
    made = draft(drafter, asked)
    assert topology(tuple(made.parents)).is_chain
    return list(made.tokens)


def oracle() -> OracleDrafter:
    return OracleDrafter({PROMPT: OUTPUT})


def table_logits(context: tuple[int, ...]) -> Tensor:
    """`[V]` numbers that depend on the last two tokens."""
    generator = torch.Generator().manual_seed(hash(context[-2:]) % 2**31)
    return torch.randn(V, dtype=torch.float64, generator=generator)


def table_law(context: tuple[int, ...]) -> Tensor:
    law = torch.softmax(1.5 * table_logits((*context, 99)), dim=-1)
    law[context[-1] % V] = 0.0
    return law / law.sum()


EVERY: dict[str, Callable[[], Drafter]] = {
    "empty": EmptyDrafter,
    "repeat": lambda: RepeatDrafter(3),
    "fixed": lambda: FixedDrafter(Draft.chain([1])),
    "oracle": oracle,
    "wrong at": lambda: WrongAtDrafter(oracle(), 1),
    "liar": lambda: LiarDrafter(oracle()),
    "raising": RaisingDrafter,
    "recording": lambda: RecordingDrafter(oracle()),
    "routing": lambda: RoutingDrafter(lambda _: oracle()),
    "tree": lambda: TreeDrafter(oracle(), RepeatDrafter(2)),
    "skewed": lambda: SkewedDrafter(table_law),
    "self": lambda: SelfDrafter(table_logits),
}


@pytest.mark.parametrize("name", EVERY)
def test_every_one_is_a_drafter_and_forgets_an_unknown_request(name: str) -> None:
    drafter = EVERY[name]()
    assert isinstance(drafter, Drafter)
    drafter.observe([])
    drafter.release("never seen")


def test_the_oracle_goes_on_from_what_is_output() -> None:
    assert tokens(oracle(), request()) == [3, 0, 5, 4]
    assert tokens(oracle(), request([3, 0], max_nodes=2)) == [5, 4]
    assert tokens(oracle(), request([3, 0, 5, 4])) == [1]
    assert tokens(oracle(), request(OUTPUT)) == []
    assert tokens(oracle(), request(prompt=(9,))) == []


def test_the_oracle_may_be_a_function_of_the_request() -> None:
    by_seed = OracleDrafter(lambda asked: [asked.seed] * 3)
    assert tokens(by_seed, request([0], seed=2)) == [2, 2]


@pytest.mark.parametrize("k", range(6))
def test_wrong_at_k_differs_from_the_oracle_there_only(k: int) -> None:
    right = tokens(oracle(), request())
    made = tokens(WrongAtDrafter(oracle(), k), request())
    assert [a != b for a, b in zip(made, right, strict=True)] == [i == k for i in range(4)]


def test_the_liar_is_wrong_everywhere_with_valid_ids() -> None:
    for output in ([], [3], [3, 0]):
        right = tokens(oracle(), request(output))
        made = tokens(LiarDrafter(oracle()), request(output))
        assert all(a != b and 0 <= a < V for a, b in zip(made, right, strict=True))


def test_empty_and_repeat() -> None:
    assert tokens(EmptyDrafter(), request()) == []
    assert tokens(RepeatDrafter(5), request(max_nodes=3)) == [5, 5, 5]


def test_raising_at_its_call_and_not_before() -> None:
    drafter = RaisingDrafter(2, oracle(), KeyError("planted"))
    assert tokens(drafter, request()) == [3, 0, 5, 4]
    with pytest.raises(KeyError, match="planted"):
        drafter.propose([request()])
    assert tokens(drafter, request()) == [3, 0, 5, 4]


def test_recording_keeps_tokens_as_they_were() -> None:
    drafter = RecordingDrafter(oracle())
    growing = list(PROMPT)
    asked = draft_request(growing, 2, max_nodes=2, vocab_size=V, name="a")
    drafter.propose([asked])
    growing.append(3)
    drafter.propose([asked, request(name="b")])
    told = StepResult("a", (), 0, None)
    drafter.observe([told])
    drafter.release("b")
    assert [r.tokens for r in drafter.requests] == [(1, 2), (1, 2, 3), (1, 2)]
    assert [d.tokens for d in drafter.drafts] == [(3, 0), (0, 5), (3, 0, 5, 4)]
    assert drafter.calls == [["a"], ["a", "b"]]
    assert (drafter.results, drafter.released) == ([told], ["b"])


def test_routing_gives_each_request_its_own_drafter_and_forgets_it() -> None:
    inner = {"a": RecordingDrafter(RepeatDrafter(1)), "b": RecordingDrafter(oracle())}
    drafter = RoutingDrafter(lambda asked: inner[asked.id])
    first, second = drafter.propose([request(name="b"), request(name="a", max_nodes=1)])
    assert (first.tokens, second.tokens) == ((3, 0, 5, 4), (1,))
    drafter.observe([StepResult("a", (), 0, None), StepResult("unknown", (), 0, None)])
    drafter.release("b")
    assert ([r.id for r in inner["a"].results], inner["b"].results) == (["a"], [])
    assert (inner["a"].released, inner["b"].released, list(drafter.routes)) == ([], ["b"], ["a"])


def paths(made: Draft) -> set[tuple[int, ...]]:
    """The token sequences from the root to every node."""
    tree = topology(tuple(made.parents))
    return {tuple(made.tokens[i] for i in tree.path(node)) for node in range(len(made.tokens))}


def prefixes(*chains: Sequence[int]) -> set[tuple[int, ...]]:
    return {tuple(chain[: i + 1]) for chain in chains for i in range(len(chain))}


def test_a_merged_tree_has_every_prefix_once() -> None:
    chains = ([1, 2, 3], [1, 2, 4, 5], [0], [1, 2, 3])
    made = merge_chains([Draft.chain(c) for c in chains], 20)
    assert paths(made) == prefixes(*chains)
    assert len(made.tokens) == len(prefixes(*chains))


def test_a_merged_tree_within_budget_cuts_every_branch() -> None:
    made = merge_chains([Draft.chain([1, 2, 3]), Draft.chain([4, 5, 6])], 4)
    assert paths(made) == prefixes([1, 2], [4, 5])
    made = merge_chains([Draft.chain([1, 2, 3]), Draft.chain([4]), Draft.chain([1, 7])], 3)
    assert paths(made) == {(1,), (4,), (1, 2)}


def test_merging_refuses_what_is_no_deterministic_chain() -> None:
    for wrong in (Draft((1, 2), (-1, -1)), Draft.chain([1], torch.ones(1, V) / V)):
        with pytest.raises(ValueError, match="only deterministic chains"):
            merge_chains([wrong], 4)


def test_the_tree_drafter_passes_on_what_it_is_told() -> None:
    inner = RecordingDrafter(oracle())
    drafter = TreeDrafter(inner, RepeatDrafter(2))
    assert paths(draft(drafter, request(max_nodes=6))) == prefixes([3, 0, 5], [2, 2, 2])
    drafter.observe([StepResult("r", (), 0, None)])
    drafter.release("r")
    assert ([r.id for r in inner.results], inner.released) == (["r"], ["r"])


def test_sampled_drafts_carry_the_law_of_each_token() -> None:
    made = draft(SkewedDrafter(table_law), request())
    assert made.probs is not None
    context = PROMPT
    for i, token in enumerate(made.tokens):
        assert torch.equal(made.probs[i], table_law(context))
        assert made.probs[i, token] > 0
        context = (*context, token)


def test_skewed_tokens_follow_the_law() -> None:
    drafter = SkewedDrafter(table_law)
    counts = torch.zeros(V, V)
    for seed in range(4000):
        first, second = tokens(drafter, request(max_nodes=2, seed=seed))
        counts[first, second] += 1
    expected = torch.stack([p * table_law((*PROMPT, i)) for i, p in enumerate(table_law(PROMPT))])
    possible = expected > 0
    assert not counts[~possible].any()
    frequencies = 4000 * expected[possible] / expected.sum()
    assert chisquare(counts[possible], frequencies, sum_check=False).pvalue > 1e-3


def test_a_draft_is_a_function_of_seed_and_context() -> None:
    drafter = SkewedDrafter(table_law)
    asked = [request(seed=s, max_nodes=8) for s in range(20)]
    made = [tuple(d.tokens) for d in drafter.propose(asked)]
    assert made == [tuple(d.tokens) for d in SkewedDrafter(table_law).propose(asked)]
    assert len(set(made)) > 10
    shorter = [tuple(tokens(drafter, request(seed=s, max_nodes=3))) for s in range(20)]
    assert shorter == [long[:3] for long in made]


def test_skewed_and_coupled_is_the_argmax_with_the_targets_noise() -> None:
    made = draft(SkewedDrafter(table_law), request([3], coupled=True))
    assert made.probs is None
    context = (*PROMPT, 3)
    for token in made.tokens:
        noise = coins.gumbel_noise(7, len(context), V)
        assert token == int(torch.argmax(table_law(context).log() + noise))
        context = (*context, token)


def test_a_law_that_is_none_is_refused() -> None:
    for wrong in (torch.full((V,), 0.5), torch.tensor([1.5, -0.5]), torch.ones(1, 1)):
        with pytest.raises(ValueError, match="a law must be"):
            SkewedDrafter(lambda _, wrong=wrong: wrong).propose([request()])


SAMPLING: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.7, "top_k": 3},
    {"temperature": 1.3, "repetition_penalty": 1.4, "frequency_penalty": 0.8},
    {"temperature": 1.0, "min_tokens": 3, "stop_token_ids": [0]},
]


@pytest.mark.parametrize("sampling", SAMPLING)
@pytest.mark.parametrize("output", [[], [3, 0, 5]])
def test_self_draws_the_targets_own_tokens(sampling: dict[str, Any], output: list[int]) -> None:
    """Against the sampler itself, one token after the other, with the history written out."""
    params = SamplingParams(**sampling)
    ends = frozenset({1, *(params.stop_token_ids or ())})
    sampler = Sampler(params, V, ends, TorchRowMath())
    drafter = SelfDrafter(table_logits)
    coupled = draft(drafter, request(output, coupled=True, **sampling))
    assert coupled.probs is None
    sampled = draft(drafter, request(output, **sampling))
    assert (sampled.probs is None) == sampler.greedy
    for made in (coupled, sampled):
        history = sampler.start(PROMPT)
        for token in output:
            history.append(token)
        context = (*PROMPT, *output)
        for i, token in enumerate(made.tokens):
            row = table_logits(context)
            if made.probs is None:
                assert token == sampler.token(row, history, 7, len(context))
            else:
                assert torch.equal(made.probs[i], sampler.law(row, history))
                assert made.probs[i, token] > 0
            history.append(token)
            context = (*context, token)


def test_what_they_can_do_is_declared() -> None:
    assert TreeDrafter.capabilities.tree
    assert not SkewedDrafter.capabilities.deterministic
    assert not SelfDrafter.capabilities.deterministic
    assert RecordingDrafter(SkewedDrafter(table_law)).capabilities == SkewedDrafter.capabilities
    assert RoutingDrafter(lambda _: oracle(), Capabilities(tree=True)).capabilities.tree
