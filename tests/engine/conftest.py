"""The rig: a tiny random target, its plain outputs, and an engine that checks itself after each
step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from foredraft import LLM, SamplingParams
from foredraft.drafters.interface import Drafter
from foredraft.engine.engine import Engine
from foredraft.models.load import LoadedModel
from foredraft.testing.drafters import OracleDrafter
from foredraft.testing.models import tiny_model

PROMPTS: list[list[int]] = [
    [3, 1, 4, 1, 5],
    [2, 7, 1, 8, 2, 8, 1, 8, 2, 8],
    [9],
    [5, 6, 7, 5, 6, 7, 5, 6, 7, 5, 6],
    [11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22, 23],
]

GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
SEEDED = SamplingParams(temperature=0.9, max_tokens=24, ignore_eos=True, seed=11)


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def checked_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """`check_integrity` after each step of every engine."""
    step = Engine.step

    def checked(engine: Engine) -> object:
        changed = step(engine)
        engine.check_integrity()
        return changed

    monkeypatch.setattr(Engine, "step", checked)


@pytest.fixture(scope="session")
def target() -> LoadedModel:
    return tiny_model(seed=1, vocab_size=32)


MakeLLM = Callable[..., LLM]


@pytest.fixture
def make_llm(target: LoadedModel) -> MakeLLM:
    """An LLM on the tiny target; `width` draft tokens a step."""

    def make(
        drafter: Drafter | None = None,
        width: int = 4,
        model: LoadedModel = target,
        rule: str | None = None,
        **options: Any,
    ) -> LLM:
        config = {"num_speculative_tokens": width, "rejection_sample_method": rule}
        return LLM(
            model,
            drafter=drafter,
            speculative_config=None if drafter is None else config,
            **({"seed": 5, "page_size": 4} | options),
        )

    return make


# By target and by what was asked; the target is kept, so that its number stays its own.
Known = dict[tuple[int, str], tuple[LoadedModel, list[int]]]


@pytest.fixture(scope="session")
def known_outputs() -> Known:
    """What plain decoding has said: it says the same every time."""
    return {}


@pytest.fixture
def plain(
    make_llm: MakeLLM, target: LoadedModel, known_outputs: Known
) -> Callable[..., list[list[int]]]:
    """Token ids of plain decoding, one prompt at a time."""

    def one(params: SamplingParams, prompt: list[int]) -> list[int]:
        key = id(target), repr((params, prompt))
        if key not in known_outputs:
            known_outputs[key] = target, list(make_llm().generate([prompt], params)[0].token_ids)
        return list(known_outputs[key][1])

    def run(params: SamplingParams, prompts: Sequence[list[int]] = PROMPTS) -> list[list[int]]:
        return [one(params, prompt) for prompt in prompts]

    return run


@pytest.fixture
def oracle(plain: Callable[..., list[list[int]]]) -> Callable[..., OracleDrafter]:
    """A drafter that knows what plain decoding says."""

    def make(params: SamplingParams, prompts: Sequence[list[int]] = PROMPTS) -> OracleDrafter:
        outputs = plain(params, prompts)
        return OracleDrafter({tuple(p): out for p, out in zip(prompts, outputs, strict=True)})

    return make
