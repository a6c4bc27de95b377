"""Anything may happen to an engine: requests come, stop, are aborted and preempted, drafters are
wrong, slow or fail. After each step its state is sound; each request says what it says alone.

`make test` plays a few short lives, `make soak` new ones for `FOREDRAFT_SOAK_MINUTES`.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from foredraft import LLM, Draft, RequestOptions, SamplingParams
from foredraft.drafters.cascade import CascadeDrafter
from foredraft.drafters.combined import CombinedDrafter
from foredraft.drafters.draft_model import DraftModelDrafter
from foredraft.engine.request import Request
from foredraft.models.decoder import cache_shape
from foredraft.planning.policy import StaticPolicy
from foredraft.testing.drafters import (
    EmptyDrafter,
    LiarDrafter,
    OracleDrafter,
    RepeatDrafter,
    ScriptedDrafter,
    TreeDrafter,
    WrongAtDrafter,
)
from foredraft.testing.pairs import tiny_noisy_pair

TARGET, DRAFT = tiny_noisy_pair(1, noise=0.1, vocab_size=32)
MINUTES = float(os.environ.get("FOREDRAFT_SOAK_MINUTES", "0"))
# The longest request: 12 tokens of prompt and 20 of answer, less the last, which is never computed.
LONGEST = 12 + 20 - 1


class Slow(ScriptedDrafter):
    def __init__(self, inner: ScriptedDrafter) -> None:
        self.inner = inner

    def draft(self, request: Any) -> Draft:
        time.sleep(0.0005)
        return self.inner.draft(request)


class Failing(ScriptedDrafter):
    """Fails at every third call."""

    def __init__(self, inner: ScriptedDrafter) -> None:
        self.inner = inner
        self.calls = 0

    def draft(self, request: Any) -> Draft:
        self.calls += 1
        if self.calls % 3 == 1:
            raise RuntimeError("as scripted")
        return self.inner.draft(request)


def scripted(kind: str, oracle: OracleDrafter) -> Any:
    return {
        "oracle": lambda: oracle,
        "wrong at 0": lambda: WrongAtDrafter(oracle, 0),
        "wrong at 2": lambda: WrongAtDrafter(oracle, 2),
        "liar": lambda: LiarDrafter(oracle),
        "empty": EmptyDrafter,
        "repeat": lambda: RepeatDrafter(7),
        "slow": lambda: Slow(oracle),
        "failing": lambda: Failing(oracle),
        "tree": lambda: TreeDrafter(LiarDrafter(oracle), WrongAtDrafter(oracle, 1), oracle),
    }[kind]()


KINDS = (
    "oracle", "wrong at 0", "wrong at 2", "liar", "empty", "repeat", "slow", "failing", "tree",
    "draft model", "model tree", "drawn tree", "cascade", "combined",
)  # fmt: skip


class Routing:
    """Each request drafted for by its own drafter; those that many share are asked together.

    The draft models are one model: what one has left in a request's pages, another reads.
    """

    def __init__(self) -> None:
        lookup = {"method": "ngram", "prompt_lookup_min": 1, "prompt_lookup_num_matches": 2}
        free = [lookup, {"method": "suffix"}, {"method": "recycling", "recycling_top_k": 2}]
        self.models = {
            "draft model": DraftModelDrafter(DRAFT, TARGET),
            "model tree": DraftModelDrafter(DRAFT, TARGET, draft_tree="top_k"),
            "drawn tree": DraftModelDrafter(DRAFT, TARGET, draft_tree="sampled"),
            "cascade": CascadeDrafter(DRAFT, lookup, TARGET),
        }
        self.combined = CombinedDrafter(TARGET, free, "merge")
        self.shared: dict[str, Any] = {**self.models, "combined": self.combined}
        own = self.models["draft model"].capabilities
        self.capabilities = replace(own, tree=True, top_ids=self.combined.capabilities.top_ids)
        self.by_id: dict[str, Any] = {}

    def propose(self, requests: Any) -> list[Draft]:
        drafts: dict[str, Draft] = {}
        for drafter in self.shared.values():
            asked = [r for r in requests if self.by_id[r.id] is drafter]
            drafts |= {r.id: d for r, d in zip(asked, drafter.propose(asked), strict=True)}
        for request in requests:
            if request.id not in drafts:
                drafts[request.id] = self.by_id[request.id].propose([request])[0]
        return [drafts[r.id] for r in requests]

    def observe(self, results: Any) -> None:
        for drafter in self.shared.values():
            drafter.observe(results)

    def release(self, request_id: str) -> None:
        for drafter in self.shared.values():
            drafter.release(request_id)

    def is_empty(self) -> bool:
        """Whether nothing is kept of any request."""
        members = self.combined.members
        return not any(model._computed for model in self.models.values()) and not any(
            member._nodes.num_expected for member in members
        )


class Widths(StaticPolicy):
    """A script of widths, read on at each question."""

    def __init__(self, script: list[int]) -> None:
        self.script, self.asked = script, 0

    def widths(self, load: Any, requests: Any) -> list[int]:
        return [self._width() for _ in requests]

    def _width(self) -> int:
        self.asked += 1
        return self.script[self.asked % len(self.script)]


TOKENS = st.integers(0, 31)
# Many begin alike, up to a page's border or around it, and have further turns.
BEGINNINGS = [3, 1, 4, 1, 5, 9, 2, 6, 5], [3, 1, 4, 1, 8, 8, 8, 8, 8]
PROMPTS = st.one_of(
    st.lists(TOKENS, min_size=1, max_size=12),
    st.builds(
        lambda beginning, length, end: [*beginning[:length], *end],
        st.sampled_from(BEGINNINGS),
        st.integers(1, 9),
        st.lists(st.integers(0, 1), max_size=3),
    ),
)
PARAMS = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.0, 0.7, 1.3]),
    seed=st.one_of(st.integers(0, 99), st.integers(0, 99), st.none()),
    max_tokens=st.integers(1, 20),
    min_tokens=st.just(0),
    ignore_eos=st.booleans(),
    top_k=st.sampled_from([0, 0, 3, 9]),
    top_p=st.sampled_from([1.0, 1.0, 0.8]),
    min_p=st.sampled_from([0.0, 0.0, 0.05]),
    repetition_penalty=st.sampled_from([1.0, 1.0, 1.2]),
    frequency_penalty=st.sampled_from([0.0, 0.0, 0.6]),
    presence_penalty=st.sampled_from([0.0, 0.0, 0.4]),
    logit_bias=st.sampled_from([None, None, {4: 1.5, 9: -2.0}]),
    banned_token_ids=st.sampled_from([None, None, [3, 6]]),
    stop_token_ids=st.sampled_from([None, None, [5], [8, 20]]),
    stop=st.sampled_from([None, None, ["a"], ["bc", "d"]]),
    logprobs=st.sampled_from([None, None, 2]),
    prompt_logprobs=st.sampled_from([None, None, 1]),
    n=st.sampled_from([1, 1, 1, 2, 3]),
)


class EngineLife(RuleBasedStateMachine):
    """One engine, from its first request to the last."""

    found = 0  # tokens found computed, in all lives
    target = TARGET
    routing: Any = Routing
    kinds: ClassVar[Mapping[str, str]] = {}  # what is drafted with in another kind's place

    @initialize(
        page_size=st.sampled_from([1, 3, 4]),
        spare=st.integers(0, LONGEST),
        script=st.lists(st.integers(0, 6), min_size=1, max_size=5),
        chunk=st.sampled_from([None, 1, 3, 7]),
        most=st.integers(1, 6),
        caching=st.sampled_from([True, True, True, False]),
    )
    def begin(
        self,
        page_size: int,
        spare: int,
        script: list[int],
        chunk: int | None,
        most: int,
        caching: bool,
    ) -> None:
        shapes = [cache_shape(m.config, m.cache_dtype) for m in (TARGET, DRAFT)]
        pages = -(-(LONGEST + spare) // page_size)
        room = pages * page_size * sum(shape.bytes_per_position for shape in shapes)
        # Made anew, so that a life replayed draws the same seeds for requests without one.
        self.solo = LLM(self.target, seed=5, kv_cache_gib=0.01, enable_prefix_caching=False)
        self.drafter = self.routing()
        self.llm = LLM(
            self.target, drafter=self.drafter, seed=5, page_size=page_size,
            kv_cache_gib=room / 2**30, max_num_seqs=most, max_num_batched_tokens=max(most, 12),
            prefill_chunk_size=chunk, enable_prefix_caching=caching,
        )  # fmt: skip
        self.engine = self.llm.engine
        self.engine.scheduler.policy = Widths(script)
        self.groups: list[tuple[Any, Any, set[str]]] = []  # group, its solo output, aborted ids

    @rule(
        prompt=PROMPTS,
        params=PARAMS,
        salt=st.sampled_from(["", "", "", "a", "b"]),
        kinds=st.lists(st.sampled_from(KINDS), min_size=3, max_size=3),
        min_tokens=st.integers(0, 6),
    )
    def arrive(
        self,
        prompt: list[int],
        params: SamplingParams,
        salt: str,
        kinds: list[str],
        min_tokens: int,
    ) -> None:
        params = replace(params, min_tokens=min(min_tokens, params.max_tokens or 0))
        solo = self.solo.generate([prompt], params)[0]
        group = self.llm._make(prompt, params, RequestOptions(cache_salt=salt))
        for request, drawn, alone in zip(group.requests, kinds, solo.outputs, strict=False):
            kind = self.kinds.get(drawn, drawn)
            oracle = OracleDrafter({tuple(prompt): list(alone.token_ids)})
            chosen = self.drafter.shared.get(kind) or scripted(kind, oracle)
            self.drafter.by_id[request.id] = chosen
        self.llm._add(group)
        self.groups.append((group, solo, set()))

    @precondition(lambda self: self.engine.has_work)
    @rule(count=st.integers(1, 6))
    def steps(self, count: int) -> None:
        for _ in range(count):
            self.step()

    def step(self) -> None:
        try:
            self.engine.step()
        except RuntimeError as error:
            if str(error) != "as scripted":
                raise
        self.engine.check_integrity()

    @precondition(lambda self: self.groups)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        group, _, aborted = data.draw(st.sampled_from(self.groups), "group")
        request: Request = data.draw(st.sampled_from(group.requests), "request")
        if not request.finished:
            aborted.add(request.id)
        self.engine.abort([request])

    @precondition(lambda self: len(self.engine.scheduler.running) > 1)
    @rule()
    def preempt(self) -> None:
        """As if memory were short: the youngest goes back to the queue."""
        youngest = self.engine.scheduler.running[-1]
        self.engine.scheduler.preempt(youngest)
        self.drafter.release(youngest.id)

    @precondition(lambda self: self.groups)
    @rule(
        data=st.data(),
        params=PARAMS,
        kinds=st.lists(st.sampled_from(KINDS), min_size=3, max_size=3),
    )
    def take_up(self, data: st.DataObject, params: SamplingParams, kinds: list[str]) -> None:
        """The next turn of what was said so far, as far as it fits."""
        group, _, _ = data.draw(st.sampled_from(self.groups), "group")
        request: Request = data.draw(st.sampled_from(group.requests), "request")
        self.arrive(request.tokens[:12], params, request.cache_salt, kinds, 0)

    @precondition(lambda self: self.engine.scheduler.num_cached_pages)
    @rule(yes=st.integers(0, 4))
    def forget(self, yes: int) -> None:
        if not yes:
            self.engine.reset_prefix_cache()

    @invariant()
    def is_sound(self) -> None:
        if hasattr(self, "engine"):
            self.engine.check_integrity()

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        steps = 0
        while self.engine.has_work:
            self.step()
            steps += 1
            assert steps < 5000, "the engine makes no progress"
        assert self.engine.scheduler.pages_in_use == 0
        type(self).found += self.engine.scheduler.prefix_hit_tokens
        self.engine.reset_prefix_cache()
        assert self.engine.pool.num_free == self.engine.pool.num_pages
        assert self.drafter.is_empty()
        for group, solo, aborted in self.groups:
            self.compare(group, solo, aborted)

    def compare(self, group: Any, solo: Any, aborted: set[str]) -> None:
        params = group.requests[0].params
        output = group.output(4)
        for request, got, want in zip(group.requests, output.outputs, solo.outputs, strict=True):
            if params.temperature > 0 and params.seed is None:
                assert len(got.token_ids) <= request.rules.max_tokens  # another draw each time
            elif request.id in aborted:
                assert got.finish_reason == "abort"
                assert want.token_ids[: len(got.token_ids)] == got.token_ids
            else:
                assert got.token_ids == want.token_ids
                assert (got.text, got.finish_reason) == (want.text, want.finish_reason)
                assert got.stop_reason == want.stop_reason
                assert logprob_ids(got) == logprob_ids(want)


def logprob_ids(output: Any) -> Any:
    return output.logprobs and [entry.token_id for entry in output.logprobs]


@pytest.fixture
def checked_steps() -> None:
    """Steps are checked by the machine itself."""


def test_every_life_of_an_engine_ends_well() -> None:
    if not MINUTES:
        lives = settings(max_examples=80, stateful_step_count=20, deadline=None, derandomize=True)
        run_state_machine_as_test(EngineLife, settings=lives)
        assert EngineLife.found > 0
        return
    lives = settings(max_examples=200, stateful_step_count=60, deadline=None)
    end = time.monotonic() + 60 * MINUTES
    while time.monotonic() < end:
        run_state_machine_as_test(EngineLife, settings=lives)
