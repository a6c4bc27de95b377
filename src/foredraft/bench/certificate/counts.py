"""Do the counts say what happened: all of a true draft accepted, nothing of a false one?

Knows drafters whose acceptance is a known number on any target; knows no law and no statistics.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from foredraft.bench.certificate.check import Check
from foredraft.bench.certificate.draws import Pair, check_finished
from foredraft.core.acceptance import Origin
from foredraft.core.sampling import SamplingParams
from foredraft.drafters.draft_model import DraftModelDrafter
from foredraft.drafters.interface import Drafter
from foredraft.engine.outputs import RequestOutput
from foredraft.testing.scripted_drafters import LiarDrafter, OracleDrafter

Progress = Callable[[str, int, int], None]  # what, done, of
TEMPERATURE = 0.8


def check_counts(
    pair: Pair,
    outputs: Mapping[str, Sequence[RequestOutput]],
    greedy: Mapping[tuple[int, ...], Sequence[int]],
    seed: int,
    progress: Progress,
) -> list[Check]:
    """The target as its own drafter, a liar, and the sums of all outputs, theirs and `outputs`.

    Args:
        outputs: of the pair under test, by the way they were run.
        greedy: what plain decoding says after each prompt.
    """
    width = max(1, pair.num_speculative_tokens)
    target_itself = DraftModelDrafter(pair.target, pair.target, width)
    liar = LiarDrafter(OracleDrafter({prompt: list(text) for prompt, text in greedy.items()}))
    max_tokens = max(map(len, greedy.values()))
    plain = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    sampled = replace(plain, temperature=TEMPERATURE, seed=seed)
    prompts = list(greedy)
    runs: list[tuple[str, Drafter, SamplingParams, float]] = [
        ("SELF drafts, greedy", target_itself, plain, 1.0),
        (f"SELF drafts, {pair.rule} rule", target_itself, sampled, 1.0),
        ("a liar's drafts, greedy", liar, plain, 0.0),
    ]
    checks = []
    own = []
    for done, (name, drafter, params, rate) in enumerate(runs):
        own.append(_outputs(pair, drafter, width, prompts, params))
        checks.append(_acceptance(f"acceptance of {name}", own[-1], rate))
        progress("acceptance of known drafts", done + 1, len(runs))
    return [*checks, _sums([*own, *outputs.values()])]


def _outputs(
    pair: Pair,
    drafter: Drafter,
    width: int,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams,
) -> list[RequestOutput]:
    outputs = pair.llm(width, drafter).generate([list(prompt) for prompt in prompts], params)
    check_finished(outputs)
    return outputs


def _acceptance(name: str, outputs: Sequence[RequestOutput], rate: float) -> Check:
    counts = [output.metrics.speculative_decoding for output in outputs]
    drafted = sum(each.num_draft_tokens for each in counts)
    accepted = sum(each.num_accepted_draft_tokens for each in counts)
    detail = f"{accepted} of {drafted} draft tokens accepted; it must be {rate:.0%}"
    passed = drafted > 0 and accepted == rate * drafted
    return Check(name, passed, accepted / drafted if drafted else None, None, detail)


def _sums(groups: Sequence[Sequence[RequestOutput]]) -> Check:
    """Law 9: a step emits the tokens it accepts and one more; nothing here is cut by a stop."""
    outputs = [output for group in groups for output in group]
    wrong = [output.request_id for output in outputs if not _adds_up(output)]
    detail = (
        f"{len(outputs)} outputs: tokens = accepted + steps, each counted once"
        if not wrong
        else f"{len(wrong)} of {len(outputs)} outputs do not add up, the first is {wrong[0]}"
    )
    return Check("counts", not wrong, float(len(outputs)), None, detail)


def _adds_up(output: RequestOutput) -> bool:
    counts = output.metrics.speculative_decoding
    accepted = sum(origin is Origin.ACCEPTED for origin in output.origins)
    histogram = counts.acceptance_histogram
    return (
        accepted == counts.num_accepted_draft_tokens
        and accepted == sum(depth * steps for depth, steps in enumerate(histogram))
        and sum(histogram) == counts.num_spec_steps
        and len(output.token_ids) == accepted + output.metrics.num_steps + 1
        and accepted <= counts.num_draft_tokens
    )
