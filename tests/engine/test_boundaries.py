"""Law 5: an output is cut inside an accepted window exactly where plain decoding cuts it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from foredraft import SamplingParams

from .conftest import GREEDY, PROMPTS

PROMPT = PROMPTS[1]


def same(left, right):
    """Everything a client sees, apart from where the tokens came from."""
    return (left.text, list(left.token_ids), left.finish_reason, left.outputs[0].stop_reason) == (
        right.text,
        list(right.token_ids),
        right.finish_reason,
        right.outputs[0].stop_reason,
    )


@pytest.mark.parametrize("offset", range(9))
def test_a_stop_id_at_every_offset_of_the_window(make_llm, oracle, plain, offset):
    """Faults 39, 40: nothing after the stop leaks, and the reason is the stop."""
    known, want = oracle(GREEDY), plain(GREEDY, [PROMPT])[0]
    stop = want[offset]
    params = replace(GREEDY, stop_token_ids=[stop], max_tokens=24)
    expected = make_llm().generate([PROMPT], params)[0]
    assert expected.token_ids == want[: want.index(stop) + 1]
    for width in (1, 3, 8):
        got = make_llm(known, width).generate([PROMPT], params)[0]
        assert same(got, expected)
        assert got.finish_reason == "stop"
        assert got.outputs[0].stop_reason == stop
        check_counts(got)


def test_a_stop_wins_over_the_length_on_the_same_token(make_llm, oracle, plain):
    want = plain(GREEDY, [PROMPT])[0]
    first = next(i for i, t in enumerate(want) if t not in want[:i] and i >= 2)
    params = replace(GREEDY, stop_token_ids=[want[first]], max_tokens=first + 1)
    got = make_llm(oracle(GREEDY), 8).generate([PROMPT], params)[0]
    assert got.finish_reason == "stop"
    assert len(got.token_ids) == first + 1


def test_eos_inside_a_draft_ends_the_request(make_llm, oracle, plain, target, monkeypatch):
    """Fault 40: any generated token may be the EOS, at every offset of the block."""
    want = plain(GREEDY, [PROMPT])[0]
    params = replace(GREEDY, ignore_eos=False)
    known = oracle(GREEDY)
    for offset in range(8):
        model = replace(target, eos_ids=frozenset({want[offset]}))
        expected = make_llm(model=model).generate([PROMPT], params)[0]
        got = make_llm(known, 8, model=model).generate([PROMPT], params)[0]
        assert same(got, expected)
        assert got.finish_reason == "stop"
        assert got.outputs[0].stop_reason is None
        assert list(got.token_ids) == want[: want.index(want[offset]) + 1]


@pytest.mark.parametrize("max_tokens", range(1, 12))
def test_max_tokens_inside_a_draft(make_llm, oracle, plain, max_tokens):
    params = replace(GREEDY, max_tokens=max_tokens)
    got = make_llm(oracle(GREEDY), 8).generate([PROMPT], params)[0]
    assert list(got.token_ids) == plain(GREEDY, [PROMPT])[0][:max_tokens]
    assert got.finish_reason == "length"
    check_counts(got)


def test_min_tokens_bans_eos_inside_the_window(make_llm, oracle, plain, target):
    """Fault 36: EOS stays banned in every row before min_tokens, though the draft proposes it."""
    want = plain(GREEDY, [PROMPT])[0]
    model = replace(target, eos_ids=frozenset({want[3]}))
    params = replace(GREEDY, ignore_eos=False, min_tokens=6)
    expected = make_llm(model=model).generate([PROMPT], params)[0]
    got = make_llm(oracle(GREEDY), 8, model=model).generate([PROMPT], params)[0]
    assert same(got, expected)
    assert want[3] not in list(got.token_ids)[:6]


def test_stop_strings_cut_the_text_and_keep_the_token(make_llm, oracle, plain, target):
    want = plain(GREEDY, [PROMPT])[0]
    text = target.tokenizer.decode(want)
    known = oracle(GREEDY)
    for start in range(10):
        stop = text[start : start + 3]
        for include in (False, True):
            params = replace(GREEDY, stop=[stop], include_stop_str_in_output=include)
            expected = make_llm().generate([PROMPT], params)[0]
            got = make_llm(known, 8).generate([PROMPT], params)[0]
            assert same(got, expected)
            end = text.index(stop) + (len(stop) if include else 0)
            assert got.text == text[:end]
            assert got.finish_reason == "stop"
            assert got.outputs[0].stop_reason == stop
            assert stop in target.tokenizer.decode(list(got.token_ids))
            assert stop not in target.tokenizer.decode(list(got.token_ids)[:-1])


def test_streamed_text_is_the_final_text_and_never_shows_a_stop_string(
    make_llm, oracle, plain, target
):
    want = plain(GREEDY, [PROMPT])[0]
    text = target.tokenizer.decode(want)
    stop = text[8:11]
    params = replace(GREEDY, stop=[stop])
    pieces, tokens, finished = [], [], None
    for delta in make_llm(oracle(GREEDY), 3).stream(PROMPT, params):
        pieces.append(delta.text)
        tokens += delta.token_ids
        assert stop not in "".join(pieces)
        finished = delta.finished
    assert finished is not None
    assert "".join(pieces) == finished.text == text[: text.index(stop)]
    assert tokens == list(finished.token_ids)


def test_usage_counts_what_was_returned(make_llm, oracle):
    """Fault 42: the number of generated tokens is the number of ids."""
    for params in (GREEDY, replace(GREEDY, max_tokens=5), SamplingParams(max_tokens=9, seed=1)):
        for output in make_llm(oracle(GREEDY), 8).generate(PROMPTS, params):
            assert output.metrics.num_generated_tokens == len(output.token_ids)
            assert len(output.origins) == len(output.token_ids)


def check_counts(output):
    """Law 9, on a finished request."""
    counts = output.metrics.speculative_decoding
    assert counts.num_accepted_draft_tokens <= counts.num_draft_tokens
    accepted = sum(origin == "accepted" for origin in output.origins)
    assert counts.num_accepted_draft_tokens == accepted
    assert sum(j * n for j, n in enumerate(counts.acceptance_histogram)) == accepted


class Syllables:
    """The tiny tokenizer with tokens of several characters, so that strings end inside them."""

    def __init__(self, inner):
        self.inner = inner

    def __getattr__(self, name):
        return getattr(self.inner, name)

    def decode(self, ids, skip_special_tokens=True):
        return "".join(self.text(token) for token in ids)

    def token_bytes(self, token_id, skip_special_tokens=True):
        return self.text(token_id).encode()

    def is_unfinished(self, token_id):
        return False

    def text(self, token):
        return "abc"[token % 3] + "xyz"[token // 3 % 3] + "abcx"[token % 4]


def test_stop_strings_that_begin_and_end_inside_tokens(make_llm, oracle, plain, target):
    model = replace(target, tokenizer=Syllables(target.tokenizer))
    known, want = oracle(GREEDY), plain(GREEDY, [PROMPT])[0]
    text = model.tokenizer.decode(want)
    for start in range(25):
        for length in (1, 2, 5, 7):
            stop = text[start : start + length]
            end = text.index(stop)
            for drafter in (None, known):
                llm = make_llm(drafter, 6, model=model)
                deltas = list(llm.stream(PROMPT, replace(GREEDY, stop=[stop])))
                output = deltas[-1].finished
                assert output.text == "".join(delta.text for delta in deltas) == text[:end]
                assert output.outputs[0].stop_reason == stop
                assert len(output.token_ids) == -(-(end + length) // 3)


def test_the_text_of_a_stop_token_is_hidden_unless_asked_for(make_llm, plain, target):
    want = plain(GREEDY, [PROMPT])[0]
    stop, at = want[4], want.index(want[4])
    for include in (False, True):
        params = replace(GREEDY, stop_token_ids=[stop], include_stop_str_in_output=include)
        output = make_llm().generate([PROMPT], params)[0]
        assert list(output.token_ids) == want[: at + 1]
        assert output.text == target.tokenizer.decode(want[: at + 1 if include else at])


def test_an_eos_that_is_a_stop_id_too_is_an_eos(make_llm, plain, target):
    want = plain(GREEDY, [PROMPT])[0]
    model = replace(target, eos_ids=frozenset({want[3]}))
    params = replace(GREEDY, ignore_eos=False, stop_token_ids=[want[3]])
    output = make_llm(model=model).generate([PROMPT], params)[0]
    assert (output.finish_reason, output.outputs[0].stop_reason) == ("stop", None)
