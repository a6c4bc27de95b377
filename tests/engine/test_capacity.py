"""The number said before the first request is that of the requests that run at once."""

from __future__ import annotations

import logging

import pytest

from foredraft import LLM, InvalidRequest, RequestOptions, SamplingParams
from foredraft.engine import build
from foredraft.engine.memory import size_words
from foredraft.models.decoder import cache_shape
from foredraft.planning.cost import CostCurve
from foredraft.planning.cost_tracking import CostTracker
from foredraft.testing.drafters import RepeatDrafter
from foredraft.testing.pairs import tiny_pair

SPECULATION = ["plain", "drafts", "draft model", "by batch size", "adaptive"]
MAX_TOKENS = 8


@pytest.fixture(scope="module")
def pair():
    return tiny_pair(2, agreement=0.8, vocab_size=42)


@pytest.fixture(autouse=True)
def cheap_rows(monkeypatch):
    """Costs that are given, and not corrected by the clock: an adaptive policy drafts."""
    curve = CostCurve((1, 8, 32), (1.0, 1.05, 1.5))
    monkeypatch.setattr(build, "cost_curve", lambda *_, **__: curve)
    monkeypatch.setattr(CostTracker, "learn", lambda *_: None)


def of_pages(pages, page_size, *models):
    """The `kv_cache_gib` that pays for so many pages of the target alone."""
    position = sum(cache_shape(m.config, m.cache_dtype).bytes_per_position for m in models)
    return (pages + 0.5) * page_size * position / 2**30


def engine(pair, speculation, pages, page_size, *, width=5, **options):
    config, drafter = {"num_speculative_tokens": width}, None
    if speculation == "plain":
        config = None
    elif speculation == "draft model":
        config |= {"method": "draft_model", "model": pair.draft}
    else:
        drafter = RepeatDrafter(width)
    if speculation == "by batch size":
        config["num_speculative_tokens_per_batch_size"] = [[1, 2, width], [3, 6, 1]]
    if speculation == "adaptive":
        config["policy"] = "adaptive"
    return LLM(
        pair.target, speculative_config=config, drafter=drafter, seed=5, page_size=page_size,
        kv_cache_gib=of_pages(pages, page_size, pair.target), **({"max_num_seqs": 64} | options),
    )  # fmt: skip


def ran_at_once(llm, prompt_tokens, max_tokens):
    """The most requests that ever ran together, of as many as would like to; and how many were
    preempted.
    """
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    waiting = [
        llm._make([2 + i % 30] * prompt_tokens, params, RequestOptions(cache_salt=str(i)))
        for i in range(70)
    ]
    for group in waiting:
        llm._add(group)
    most = []
    while llm.engine.has_work:
        llm.engine.step()
        # Those that ended in this step ran in it too.
        running = sum(not group.finished for group in waiting if group.requests[0].pages)
        ended = [group for group in waiting if group.finished]
        waiting = [group for group in waiting if not group.finished]
        most.append(running + len(ended))
        if len(most) == 3 * max_tokens:
            break
    preempted = llm.engine.scheduler.num_preemptions
    llm._abort(waiting)
    return max(most), most[0], preempted


@pytest.mark.parametrize("speculation", SPECULATION)
@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize(("pages", "prompt_tokens"), [(13, 5), (40, 11), (90, 30), (200, 3)])
def test_the_capacity_is_what_runs_at_once(pair, speculation, page_size, pages, prompt_tokens):
    llm = engine(pair, speculation, pages * 16 // page_size, page_size)
    said = llm.capacity(prompt_tokens, MAX_TOKENS)
    most, first, _ = ran_at_once(llm, prompt_tokens, MAX_TOKENS)
    assert said.admitted == first
    # A width that depends on the load or on what was learnt may make room for one more later.
    assert most - said.admitted in ((0, 1) if speculation in SPECULATION[3:] else (0,))


@pytest.mark.parametrize("max_tokens", [1, 2, 4])
def test_no_draft_is_longer_than_the_answer(pair, max_tokens):
    llm = engine(pair, "drafts", 60, 1, width=20)
    assert llm.capacity(3, max_tokens).admitted == ran_at_once(llm, 3, max_tokens)[0]


@pytest.mark.parametrize("speculation", SPECULATION[1:3])
@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_the_capacity_without_speculation_is_that_of_a_plain_engine(pair, speculation, page_size):
    llm = engine(pair, speculation, 100, page_size)
    without = llm.capacity(9, MAX_TOKENS, speculation=False)
    plain = engine(pair, "plain", 100, page_size)
    assert without == plain.capacity(9, MAX_TOKENS)
    assert without.admitted == ran_at_once(plain, 9, MAX_TOKENS)[0]
    assert llm.capacity(9, MAX_TOKENS).admitted <= without.admitted


@pytest.mark.parametrize("speculation", SPECULATION[:3])
@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("pages", [60, 77, 160])
def test_so_many_reach_their_end_undisturbed(pair, speculation, page_size, pages):
    whole = engine(pair, speculation, pages, page_size).capacity(9, 20)
    calm = engine(pair, speculation, pages, page_size, max_num_seqs=whole.undisturbed)
    assert ran_at_once(calm, 9, 20)[2] == 0
    if whole.undisturbed < whole.admitted and speculation == "plain":
        crowded = engine(pair, speculation, pages, page_size, max_num_seqs=whole.undisturbed + 1)
        assert ran_at_once(crowded, 9, 20)[2] > 0


def test_what_limits_is_named(pair):
    many = engine(pair, "drafts", 500, 4, max_num_seqs=3).capacity(9, 8)
    assert (many.admitted, many.limit) == (3, "max_num_seqs")
    few = engine(pair, "drafts", 7, 4).capacity(9, 8)
    assert (few.admitted, few.limit) == (1, "pages")
    none = engine(pair, "drafts", 7, 4).capacity(90, 8)
    assert (none.admitted, none.undisturbed, none.limit) == (0, 0, "pages")


def test_an_answer_is_cut_to_the_context(pair):
    llm = engine(pair, "plain", 500, 4, max_model_len=20)
    assert llm.capacity(15, 1000) == llm.capacity(15, 5)

    assert llm.capacity(20, 1).admitted == 0
    assert llm.capacity(20, 1).limit == "max_model_len"


@pytest.mark.parametrize("size", [(0, 1), (1.5, 1), (True, 1), (5, 0), (5, None)], ids=str)
def test_what_is_no_size_is_refused(pair, size):
    with pytest.raises(InvalidRequest, match="must be a positive integer, got"):
        engine(pair, "plain", 500, 4).capacity(*size)


def test_the_line_says_what_speculation_costs(pair):
    llm = engine(pair, "draft model", 240, 4)
    here, without = llm.capacity(224, 32), llm.capacity(224, 32, speculation=False)
    assert here.admitted < without.admitted
    line = llm.capacity_line()
    assert f"in {llm.config.num_pages} pages of 4 tokens (240 without speculation); " in line
    assert f"; {here.admitted} requests of 224 + 32 tokens at once" in line
    assert line.endswith(f"({without.admitted} without speculation)")
    held = llm.engine.cache.num_bytes + llm.engine.draft_cache.num_bytes
    assert line.startswith(f"cache: {size_words(held)} in ")


def test_the_line_of_a_plain_engine_speaks_of_no_speculation(pair):
    line = engine(pair, "plain", 50, 4, max_num_seqs=2, max_model_len=32).capacity_line()
    assert "2 requests of 28 + 4 tokens at once (max_num_seqs allows no more)" in line
    assert "speculation" not in line


def test_an_engine_logs_its_line(pair, caplog):
    caplog.set_level(logging.INFO, "foredraft")
    llm = engine(pair, "drafts", 50, 4)
    assert caplog.messages == [f"{pair.target.name}: {llm.capacity_line()}"]


@pytest.mark.parametrize("length", [1, 2, 3])
def test_the_shortest_contexts_have_a_line(pair, length, caplog):
    caplog.set_level(logging.INFO, "foredraft")
    engine(pair, "drafts", 50, 4, max_model_len=length)
    many = {1: "0 requests of 1 + 0", 2: "25 requests of 1 + 1", 3: "25 requests of 2 + 1"}
    assert f"; {many[length]} tokens at once" in caplog.messages[0]
