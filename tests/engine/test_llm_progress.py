"""How far a batch is: told to a function, or shown on a terminal."""

from __future__ import annotations

import io
import sys
from dataclasses import replace

import pytest

from foredraft import InvalidRequest

from .conftest import GREEDY, PROMPTS


def test_a_function_is_told_of_every_prompt_that_ends(make_llm):
    told = []
    each = [replace(GREEDY, max_tokens=n) for n in (3, 9, 3, 1, 6)]
    make_llm().generate(PROMPTS, each, progress=lambda *numbers: told.append(numbers))
    assert told == [(0, 5), (1, 5), (3, 5), (4, 5), (5, 5)]


def test_the_completions_of_a_prompt_are_one(make_llm):
    told = []
    params = replace(GREEDY, temperature=1.0, n=3)
    make_llm().generate(PROMPTS[:1], params, progress=lambda *numbers: told.append(numbers))
    assert told == [(0, 1), (1, 1)]


def test_a_function_that_fails_ends_the_batch(make_llm):
    def fail(done, total):
        if done:
            raise RuntimeError("as scripted")

    llm = make_llm()
    each = [replace(GREEDY, max_tokens=n) for n in (3, 20, 20, 20, 20)]
    with pytest.raises(RuntimeError, match="as scripted"):
        llm.generate(PROMPTS, each, progress=fail)
    assert not llm.engine.has_work
    assert llm.engine.scheduler.pages_in_use == 0


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize("kind", [Terminal, io.StringIO])
def test_a_bar_is_for_terminals(make_llm, monkeypatch, capsys, kind):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    monkeypatch.setattr(sys, "stderr", kind())
    make_llm().generate(PROMPTS, GREEDY, progress=True)
    shown = sys.stderr.getvalue()
    assert ("5/5" in shown) == (kind is Terminal)
    assert kind is Terminal or shown == ""
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("progress", [None, 1, "yes"])
def test_progress_is_honoured_or_refused(make_llm, progress):
    llm = make_llm()
    with pytest.raises(InvalidRequest, match="progress must be True, False or a function"):
        llm.generate(PROMPTS, GREEDY, progress=progress)
    assert not llm.engine.has_work
