"""A known answer and a real draft: which nodes are accepted, and what a load comes to."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from foredraft.bench.serve.arrivals import Job, Prompt
from foredraft.bench.serve.replay import Replayed
from foredraft.drafters.interface import Capabilities, Draft, DraftRequest
from foredraft.planning.allocation import Costs
from foredraft.planning.cost import CostCurve
from foredraft.planning.policy import FixedWidth, Offer, StepRecord
from foredraft.planning.simulate import Machine, play

ANSWER = tuple(range(100, 160))
CURVE = CostCurve((1, 4), (1.0, 1.6))


class Knows:
    """Drafts the answer itself, up to some position of every draft."""

    capabilities = Capabilities(tree=True)

    def __init__(self, right: int) -> None:
        self.right = right
        self.asked: list[tuple[str, int]] = []
        self.released: list[str] = []

    def propose(self, requests: Sequence[DraftRequest]) -> Sequence[Draft]:
        drafts = []
        for request in requests:
            self.asked.append((request.id, len(request.tokens)))
            start = len(request.tokens) - request.num_prompt_tokens
            tokens = list(ANSWER[start : start + self.right]) + [0] * request.max_nodes
            tokens = tokens[: request.max_nodes]
            drafts.append(Draft(tokens, range(-1, len(tokens) - 1)))
        return drafts

    def observe(self, results: Sequence[object]) -> None:
        """Nothing to learn."""

    def release(self, request_id: str) -> None:
        self.released.append(request_id)


def request(drafter: Knows | None, index: int = 0, max_tokens: int = 60) -> Replayed:
    prompt = Prompt(f"prompt {index}", "task", "", (1, 2, 3))
    return Replayed(Job(index, prompt, max_tokens, 0), ANSWER, drafter, f"load/{index}", 200)


def test_the_path_that_the_answer_takes_is_accepted() -> None:
    one = request(Knows(9))
    one._draft = (7, 100, 8, 101, 9, 102)
    tree = Offer("0", "greedy", 3, (-1, -1, 0, 1, 1, 3))
    assert one.accepted(tree, range(6)) == [1, 3, 5]
    assert one.accepted(tree, [1, 4]) == [1]  # the rest of the path was left out
    assert one.accepted(tree, [0, 2]) == []
    judged = one.judged(6, tree, [0, 1, 3], [1, 3])
    assert (judged.drafted, judged.accepted, judged.num_nodes) == (2, 2, 3)
    assert [(each.depth, each.accepted) for each in judged.tried] == [
        (0, False), (0, True), (1, True)
    ]  # fmt: skip


@pytest.mark.parametrize("right", [0, 2, 3])
def test_a_load_takes_what_its_steps_take(right: int) -> None:
    drafter = Knows(right)
    steps: list[StepRecord] = []
    requests = [request(drafter, index) for index in range(2)]
    played = play(FixedWidth(3), requests, Machine(Costs(CURVE), 1), observe=steps.append)
    assert played.num_tokens == 2 * len(ANSWER)
    assert [each.trace.finished for each in requests] == [True, True]
    assert sum(e.tokens for e in requests[1].trace.emissions) == len(ANSWER)
    assert {len(each.emissions) for each in (one.trace for one in requests)} == {
        -(-len(ANSWER) // (right + 1))
    }
    decoding = [step for step in steps if step.num_draft_rows == 3 and step.load.num_rows == 1]
    assert all(step.seconds == pytest.approx(1.6) for step in decoding)
    assert drafter.released == ["load/0", "load/1"]
    lengths = [length for name, length in drafter.asked if name == "load/1"]
    assert lengths[0] == 3  # the prompt, then as much more as was said
    assert lengths == sorted(set(lengths))


def test_without_a_drafter_every_token_is_a_step() -> None:
    one = request(None, max_tokens=20)
    played = play(FixedWidth(0), [one], Machine(Costs(CURVE), 1))
    assert (played.num_tokens, len(one.trace.emissions)) == (20, 20)
