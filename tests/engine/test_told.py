"""What a drafter is asked and told, and what the metrics say, against the run as it was."""

from __future__ import annotations

from dataclasses import replace

import pytest

from foredraft.testing.drafters import (
    LiarDrafter,
    RecordingDrafter,
    RepeatDrafter,
    TreeDrafter,
    WrongAtDrafter,
)

from .conftest import GREEDY, PROMPTS, SEEDED


@pytest.mark.parametrize("params", [GREEDY, SEEDED], ids=["greedy", "coupled"])
@pytest.mark.parametrize("chunk", [None, 3])
def test_every_computed_row_is_told_once_with_its_position(make_llm, oracle, params, chunk):
    known = oracle(params)
    tree = TreeDrafter(LiarDrafter(known), WrongAtDrafter(known, 2), known)
    for inner in (known, WrongAtDrafter(known, 1), tree):
        drafter = RecordingDrafter(inner)
        llm = make_llm(drafter, 6, prefill_chunk_size=chunk)
        outputs = llm.generate(PROMPTS, params)
        for output in outputs:
            check_told(drafter, output)


def check_told(drafter, output):
    tokens = [*output.prompt_token_ids, *output.token_ids]
    results = [r for r in drafter.results if r.id == output.request_id]
    committed = {}
    emitted = 0
    for result in results:
        for row in result.rows:
            if row.committed:
                assert tokens[row.position] == row.token
                assert row.position not in committed, "a committed position was told twice"
                committed[row.position] = row.token
            else:
                assert row.node >= 0
        nodes = [row.node for row in result.rows if row.node >= 0]
        assert nodes == list(range(len(nodes)))
        kept = [row for row in result.rows if row.node >= 0 and row.committed]
        assert len(kept) == result.num_accepted
        # Rejected nodes lie where the committed tokens go on, or beyond.
        root = max(row.position for row in result.rows if row.node < 0)
        assert all(row.position > root for row in result.rows if row.node >= 0)
        if result.next_token is not None:
            emitted += result.num_accepted + 1
            if emitted <= len(output.token_ids):
                assert result.next_token == output.token_ids[emitted - 1]
    # Every position but the last token's, which was never computed, or a draft's that ended it all.
    assert sorted(committed) == list(range(len(committed)))
    assert len(committed) in (len(tokens) - 1, len(tokens))


def test_a_drafter_sees_committed_tokens_and_is_released_once(make_llm, oracle):
    drafter = RecordingDrafter(oracle(GREEDY))
    llm = make_llm(drafter, 3)
    outputs = llm.generate(PROMPTS, GREEDY)
    whole = {o.request_id: [*o.prompt_token_ids, *o.token_ids] for o in outputs}
    for request in drafter.requests:
        assert list(request.tokens) == whole[request.id][: len(request.tokens)]
        assert request.max_nodes >= 1
    assert sorted(drafter.released) == sorted(whole)
    stream = llm.stream(PROMPTS[0], GREEDY)
    next(stream)
    stream.close()
    assert len(drafter.released) == len(whole) + 1


def test_the_metrics_are_those_of_the_run(make_llm, oracle):
    """Law 9, chains and trees: drafted is what was verified, accepted never has the extra token."""
    known = oracle(GREEDY)
    tree = TreeDrafter(LiarDrafter(known), WrongAtDrafter(known, 2), known)
    for inner in (known, WrongAtDrafter(known, 1), LiarDrafter(known), tree):
        drafter = RecordingDrafter(inner)
        outputs = make_llm(drafter, 5).generate(PROMPTS, GREEDY)
        for output in outputs:
            drafts = [
                draft
                for request, draft in zip(drafter.requests, drafter.drafts, strict=True)
                if request.id == output.request_id and draft.tokens
            ]
            accepted = sum(origin == "accepted" for origin in output.origins)
            counts = output.metrics.speculative_decoding
            assert counts.num_draft_tokens == sum(len(draft.tokens) for draft in drafts)
            assert counts.num_spec_steps == len(drafts)
            assert counts.num_accepted_draft_tokens == accepted
            assert sum(counts.acceptance_histogram) == len(drafts)
            assert counts.mean_acceptance_length == pytest.approx(1 + accepted / len(drafts))
            assert counts.num_spec_tokens == 5


def test_steps_and_the_first_step_are_counted(make_llm, oracle):
    params = replace(GREEDY, max_tokens=12)
    plain = make_llm().generate([PROMPTS[0]], params)[0].metrics
    assert (plain.num_steps, plain.num_first_step_tokens) == (11, 1)
    fast = make_llm(oracle(GREEDY), 3).generate([PROMPTS[0]], params)[0].metrics
    assert (fast.num_steps, fast.num_first_step_tokens) == (2, 4)
    slow = make_llm(RepeatDrafter(3), 3, prefill_chunk_size=1).generate([PROMPTS[0]], params)[0]
    assert slow.metrics.num_first_step_tokens >= 1
    for metrics in (plain, fast, slow.metrics):
        assert metrics.prefill_seconds > 0
        assert metrics.decode_seconds > 0
        decoded = metrics.num_generated_tokens - metrics.num_first_step_tokens
        assert metrics.decode_tokens_per_second == pytest.approx(decoded / metrics.decode_seconds)


def test_one_token_has_no_decoding_speed(make_llm):
    metrics = make_llm().generate([PROMPTS[0]], replace(GREEDY, max_tokens=1))[0].metrics
    assert metrics.num_steps == 0
    assert metrics.decode_tokens_per_second == 0.0


@pytest.mark.parametrize("broken", ["tap", "committed", "stepped", "observe"])
def test_steps_are_learned_from_whatever_fails_in_those_who_watch(make_llm, plain, broken):
    """A failure in each step: the step is committed, and metrics and policy learn of each."""

    def fail(*_):
        raise OSError("as scripted")

    llm = make_llm(RepeatDrafter(3), 2, tap=fail if broken == "tap" else None)
    policy = llm.engine.scheduler.policy

    class Watching:
        def __init__(self):
            self.steps, self.commits = [], 0
            self.widths, self.release = policy.widths, policy.release
            self.stopping, self.keep = policy.stopping, policy.keep

        def committed(self, commits):
            self.commits += 1

        def stepped(self, record):
            self.steps.append(record)

        def ended(self, requests):
            pass

        observe = stepped

    failing, witness, learner = Watching(), Watching(), Watching()
    if broken != "tap":
        setattr(learner if broken == "observe" else failing, broken, fail)
    llm.engine.observers += [failing, witness]
    llm.engine.scheduler.policy = learner
    group = llm._make(PROMPTS[0], GREEDY)
    llm._add(group)
    steps = 0
    while not group.finished:
        steps += 1
        with pytest.raises(OSError, match="as scripted"):
            llm.engine.step()
    assert list(group.output(2).token_ids) == plain(GREEDY)[0]
    assert witness.commits == len(witness.steps) == steps
    assert broken == "observe" or learner.steps == witness.steps


def test_a_drafter_that_does_not_observe_is_told_nothing(make_llm, oracle):
    told = []
    drafter = RecordingDrafter(oracle(GREEDY))
    drafter.observe = told.append
    for observes in (True, False):
        drafter.capabilities = replace(drafter.capabilities, observes=observes)
        told.clear()
        outputs = make_llm(drafter, 3).generate(PROMPTS, GREEDY)
        assert bool(told) is observes
        assert sum(output.metrics.speculative_decoding.num_draft_tokens for output in outputs) > 0
    assert sorted(drafter.released)
