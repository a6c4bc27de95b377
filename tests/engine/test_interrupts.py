"""Ctrl-C can fall on any line, and threads can meet anywhere: no page is lost, nothing is torn.

What remains in pure Python: an interrupt between two bytecodes of one line, or two interrupts in a
row, one of them inside the cleaning up after the other.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from foredraft import LLM
from foredraft.drafters.ngram import NgramDrafter
from foredraft.engine.engine import Engine
from foredraft.engine.stops import Stop
from foredraft.models.decoder import cache_shape
from foredraft.testing.drafters import EmptyDrafter

from .conftest import GREEDY, PROMPTS, SEEDED

TRACED = ("/foredraft/engine/", "/foredraft/cache/", "/foredraft/drafters/")
STEP = Engine.step
Place = tuple[str, int]
SHORT = replace(GREEDY, max_tokens=4)
MANY = replace(SEEDED, max_tokens=3, n=2)


class Tracer:
    """Notes the lines that a call runs, or raises KeyboardInterrupt before the nth of them."""

    def __init__(self, interrupt_at: int = -1) -> None:
        self.lines: list[Place] = []
        self._interrupt_at = interrupt_at
        self._known: dict[str, Any] = {}  # what traces the lines of a file

    def run(self, call: Callable[[], Any]) -> Any:
        before = sys.gettrace()
        sys.settrace(self._enter)
        try:
            return call()
        finally:
            sys.settrace(before)

    def _enter(self, frame: Any, event: str, argument: Any) -> Any:
        name = frame.f_code.co_filename
        if name not in self._known:
            self._known[name] = self._line if any(part in name for part in TRACED) else None
        return self._known[name]

    def _line(self, frame: Any, event: str, argument: Any) -> Any:
        if event == "line":
            self.lines.append((frame.f_code.co_filename, frame.f_lineno))
            if len(self.lines) == self._interrupt_at + 1:
                raise KeyboardInterrupt
        return self._line


@pytest.fixture
def bare_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps as users run them. The rig's check of each is no place where an interrupt could fall;
    what is left after every interrupt is checked as ever.
    """
    monkeypatch.setattr(Engine, "step", STEP)


def first_and_last_times(lines: list[Place]) -> list[int]:
    first: dict[Place, int] = {}
    last: dict[Place, int] = {}
    for index, line in enumerate(lines):
        first.setdefault(line, index)
        last[line] = index
    return sorted({*first.values(), *last.values()})


def assert_nothing_left(llm: LLM) -> None:
    llm.engine.check_integrity()
    assert llm.engine.pool.num_used == 0
    assert not llm.engine.has_work
    assert not llm.drafter._indexes


@pytest.mark.usefixtures("bare_steps")
@pytest.mark.parametrize("params", [SHORT, MANY], ids=["two prompts", "shared pages"])
def test_an_interrupt_at_any_line_loses_no_page(make_llm, params):
    llm = make_llm(NgramDrafter(), 3, page_size=4, max_num_batched_tokens=16)

    def generate():
        llm.engine.reset_prefix_cache()
        return llm.generate([PROMPTS[1], PROMPTS[3][:7]], params)

    tracer = Tracer()
    want = [list(output.token_ids) for output in tracer.run(generate)]
    places = first_and_last_times(tracer.lines)
    assert len(places) > 300
    for place in places:
        with pytest.raises(KeyboardInterrupt):
            Tracer(place).run(generate)
        assert_nothing_left(llm)
    if params is SHORT:
        assert [list(output.token_ids) for output in generate()] == want


@pytest.mark.usefixtures("bare_steps")
def test_an_interrupt_loses_no_page_where_prefixes_are_found_and_evicted(make_llm, plain, target):
    """The lines that are run for these alone, in a cache of eight pages."""
    a_page = 4 * cache_shape(target.config, target.cache_dtype).bytes_per_position
    llm = make_llm(NgramDrafter(), 3, kv_cache_gib=8 * a_page / 2**30)
    cold = Tracer()
    cold.run(lambda: llm.generate([PROMPTS[1]], SHORT))

    def generate():
        return llm.generate([PROMPTS[1], PROMPTS[4]], SHORT)

    def prepare():
        llm.engine.reset_prefix_cache()
        llm.generate([PROMPTS[1], PROMPTS[3]], SHORT)

    prepare()
    warm = Tracer()
    want = [list(output.token_ids) for output in warm.run(generate)]
    assert want == plain(SHORT, [PROMPTS[1], PROMPTS[4]])
    new = set(warm.lines) - set(cold.lines)
    assert {Path(name).name for name, _ in new} >= {"pool.py", "prefix.py", "pages.py"}
    for place in first_and_last_times(warm.lines):
        if warm.lines[place] in new:
            prepare()
            with pytest.raises(KeyboardInterrupt):
                Tracer(place).run(generate)
            assert_nothing_left(llm)
    assert [list(output.token_ids) for output in generate()] == want


def test_an_interrupt_in_a_step_ends_streams_that_share_it(make_llm):
    """A commit cut in two would leave them torn."""
    llm = make_llm(NgramDrafter(), 3, page_size=4)

    def open_stream():
        stream = llm.stream(PROMPTS[0], GREEDY)
        next(stream)
        return stream

    stream = open_stream()
    tracer = Tracer()
    tracer.run(lambda: next(stream))
    stream.close()
    for place in first_and_last_times(tracer.lines):
        other, stream = open_stream(), open_stream()
        with pytest.raises(KeyboardInterrupt):
            Tracer(place).run(lambda stream=stream: next(stream))
        last = list(other)[-1]
        assert last.finished is not None
        assert last.finished.finish_reason in ("abort", "length")
        assert_nothing_left(llm)


def test_an_interrupt_while_one_stream_is_closed_leaves_the_other(make_llm, plain):
    llm = make_llm(NgramDrafter(), 3, page_size=2)

    def open_stream(prompt):
        stream = llm.stream(prompt, GREEDY)
        next(stream)
        return stream

    tracer = Tracer()
    tracer.run(open_stream(PROMPTS[0]).close)
    assert len(tracer.lines) > 30
    for place in range(len(tracer.lines)):
        closed, other = open_stream(PROMPTS[0]), open_stream(PROMPTS[1])
        with pytest.raises(KeyboardInterrupt):
            Tracer(place).run(closed.close)
        llm.engine.check_integrity()
        *_, last = other
        assert list(last.finished.token_ids) == plain(GREEDY, [PROMPTS[1]])[0]
        assert_nothing_left(llm)


def test_every_request_is_ended_even_if_one_cannot_be(make_llm, monkeypatch):
    llm = make_llm(EmptyDrafter(), 3)
    groups = [llm._make(prompt, GREEDY) for prompt in PROMPTS[:3]]
    for group in groups:
        llm._add(group)
    llm.engine.step()
    broken = groups[1].requests[0]
    finish = broken.finish

    def failing(stop: Stop, error: str | None = None) -> None:
        finish(stop, error)
        raise RuntimeError("as scripted")

    monkeypatch.setattr(broken, "finish", failing)
    with pytest.raises(RuntimeError, match="as scripted"):
        llm._abort(groups)
    assert all(group.finished for group in groups)
    assert llm.engine.pool.num_used == 0
    assert not llm.engine.has_work


def test_a_second_thread_is_refused_and_the_first_goes_on(make_llm, plain):
    failures: list[BaseException] = []

    def intrude() -> None:
        try:
            llm.generate([PROMPTS[1]], GREEDY)
        except RuntimeError as error:
            failures.append(error)

    def tap(*_: Any) -> None:
        if not failures:
            thread = threading.Thread(target=intrude)
            thread.start()
            thread.join(timeout=60)

    llm = make_llm(tap=tap)
    assert list(llm.generate([PROMPTS[0]], GREEDY)[0].token_ids) == plain(GREEDY)[0]
    assert len(failures) == 1
    assert "one LLM serves one thread at a time" in str(failures[0])
    assert list(llm.generate([PROMPTS[1]], GREEDY)[0].token_ids) == plain(GREEDY)[1]
    assert llm.engine.pool.num_used == 0


def test_one_thread_after_another_is_served(make_llm, plain):
    llm = make_llm()
    outputs: list[list[int]] = []

    def generate() -> None:
        outputs.append(list(llm.generate([PROMPTS[0]], GREEDY)[0].token_ids))

    for _ in range(2):
        thread = threading.Thread(target=generate)
        thread.start()
        thread.join(timeout=60)
    assert outputs == [plain(GREEDY)[0]] * 2
