"""Anything may happen to an engine whose drafters read features: the lives of `test_soak`, and
drafts that are always those of the heads' modules on the committed text.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

import pytest
from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test

from foredraft import Draft
from foredraft.drafters.eagle import EagleDrafter
from foredraft.drafters.medusa import MedusaDrafter
from foredraft.models.interface import HEAD_INPUT

from .eagle_rig import LAYERS, reference_draft, trained
from .test_medusa import new_heads
from .test_soak import MINUTES, EngineLife, Routing

TARGET, HEAD = trained()  # the target of `test_soak` has other weights and the same vocabulary
DEPTHS = (*LAYERS, HEAD_INPUT)


class HeadRouting(Routing):
    """Chains and trees are one head's: what one has left in a request's pages, another reads."""

    def __init__(self) -> None:
        self.models = {
            "eagle": EagleDrafter(TARGET, HEAD),
            "eagle tree": EagleDrafter(TARGET, HEAD, draft_tree="top_k"),
            "medusa": MedusaDrafter(new_heads(TARGET), TARGET),
        }
        self.shared: dict[str, Any] = dict(self.models)
        own = self.models["eagle"].capabilities
        self.capabilities = replace(own, tree=True, feature_layers=DEPTHS)
        self.by_id: dict[str, Any] = {}
        self.checked = 0

    def propose(self, requests: Any) -> list[Draft]:
        drafts = super().propose(requests)
        for request, draft in zip(requests, drafts, strict=True):
            plain = request.sampler.plain_argmax and self.by_id[request.id] is self.models["eagle"]
            if draft.tokens and plain:
                text = list(request.tokens)
                want = reference_draft(TARGET, HEAD, text, len(draft.tokens))
                assert list(draft.tokens) == want
                HeadLife.checked += 1
        return drafts

    def observe(self, results: Any) -> None:
        def cut(result: Any, columns: slice) -> Any:
            told = result.features
            return result if told is None else replace(result, features=told[:, columns])

        width = TARGET.config.hidden_size
        last = slice(len(LAYERS) * width, None)
        for name, drafter in self.models.items():
            columns = last if name == "medusa" else slice(0, len(LAYERS) * width)
            drafter.observe([cut(result, columns) for result in results])

    def is_empty(self) -> bool:
        eagles = [self.models["eagle"]._told, self.models["eagle tree"]._told]
        return not any((*eagles, self.models["medusa"]._last))


class HeadLife(EngineLife):
    """The same with heads."""

    checked = 0  # drafts
    target = TARGET
    routing = HeadRouting
    kinds: ClassVar[Mapping[str, str]] = {
        "draft model": "eagle", "model tree": "eagle tree", "drawn tree": "medusa",
        "cascade": "eagle", "combined": "eagle tree", "oracle": "eagle", "repeat": "eagle",
    }  # fmt: skip


@pytest.fixture
def checked_steps() -> None:
    """Steps are checked by the machine itself."""


def test_every_life_with_heads_ends_well() -> None:
    lives = settings(max_examples=15, stateful_step_count=15, deadline=None, derandomize=True)
    if not MINUTES:
        run_state_machine_as_test(HeadLife, settings=lives)
        assert HeadLife.checked > 3
        return
    end = time.monotonic() + 60 * MINUTES
    while time.monotonic() < end:
        lives = settings(max_examples=200, stateful_step_count=60, deadline=None)
        run_state_machine_as_test(HeadLife, settings=lives)
