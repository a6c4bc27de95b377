"""The target's hidden states, told of every computed row to drafters that ask, and of none to
others.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from foredraft import LLM, ConfigError, RequestOptions
from foredraft.drafters.combined import CombinedDrafter
from foredraft.drafters.interface import Capabilities, Draft
from foredraft.kernels.catalog import native_available
from foredraft.kernels.interface import Segment
from foredraft.models.decoder import new_cache
from foredraft.models.interface import HEAD_INPUT, FlatBatch, LayerResume
from foredraft.testing.drafters import EmptyDrafter, LiarDrafter, RecordingDrafter, TreeDrafter
from foredraft.testing.models import tiny_model

from .conftest import GREEDY, PROMPTS, SEEDED
from .eagle_rig import features_of

DEPTHS = (2, HEAD_INPUT, 0)


def asking(inner, **capabilities):
    drafter = RecordingDrafter(inner)
    drafter.capabilities = Capabilities(**({"tree": True, "feature_layers": DEPTHS} | capabilities))
    return drafter


def check_told(drafter, target, outputs):
    """What was told of committed rows is what one pass over the whole text computes."""
    told = 0
    texts = [[*each.prompt_token_ids, *each.token_ids] for each in outputs]
    whole = [features_of(target, text, DEPTHS) for text in texts]
    starts = {
        tuple(text[: len(o.prompt_token_ids)]): i
        for i, (text, o) in enumerate(zip(texts, outputs, strict=True))
    }
    by_request: dict[str, list] = {}
    for result in drafter.results:
        by_request.setdefault(result.id, []).append(result)
    for results in by_request.values():
        rows = [row for result in results for row in result.rows if row.committed]
        prompt = tuple(row.token for row in rows)
        (of,) = {i for start, i in starts.items() if prompt[: len(start)] == start}
        for result in results:
            if result.features is None:
                continue
            assert result.features.shape == (len(result.rows), 3 * 32)
            for row, found in zip(result.rows, result.features, strict=True):
                if row.committed:
                    torch.testing.assert_close(found, whole[of][row.position], rtol=0, atol=1e-10)
                    told += 1
    return told


@pytest.mark.parametrize("params", [GREEDY, SEEDED], ids=["greedy", "coupled"])
@pytest.mark.parametrize("chunk", [1, 4, None])
def test_they_are_the_targets_own_of_every_committed_row(
    make_llm, plain, oracle, target, params, chunk
):
    known = oracle(params)
    drafter = asking(TreeDrafter(LiarDrafter(known), known))
    outputs = make_llm(drafter, 6, prefill_chunk_size=chunk).generate(PROMPTS, params)
    assert [list(output.token_ids) for output in outputs] == plain(params)
    # The last step of a request leaves nothing to draft for.
    told = check_told(drafter, target, outputs)
    assert told > sum(len(o.prompt_token_ids) + len(o.token_ids) - 9 for o in outputs)


def test_rows_of_the_drafters_own_are_told_in_their_order(make_llm, target):
    class Own(EmptyDrafter):
        def draft(self, request):
            count = min(request.max_nodes, 4)
            verify = (False, True, True, False)[:count]
            return Draft((3, 4, 5, 6)[:count], (-1, -1, 1, 0)[:count], verify=verify)

    drafter = asking(Own())
    (output,) = make_llm(drafter, 4).generate([PROMPTS[1]], replace(GREEDY, max_tokens=6))
    assert check_told(drafter, target, [output]) >= len(PROMPTS[1])
    (result,) = [each for each in drafter.results if len(each.rows) == 5][:1]
    first = result.rows[0].position
    text = [*output.prompt_token_ids, *output.token_ids][: first + 1]
    for row, found in zip(result.rows[1:], result.features[1:], strict=True):
        path = {0: [3], 1: [4], 2: [4, 5], 3: [3, 6]}[row.node]
        torch.testing.assert_close(found, features_of(target, [*text, *path], DEPTHS)[-1])


def test_nothing_is_computed_or_told_where_nobody_asks(make_llm, target, monkeypatch):
    asked = []
    run = type(target.model).run

    def noted(model, batch, cache):
        asked.append(batch.feature_layers)
        return run(model, batch, cache)

    monkeypatch.setattr(type(target.model), "run", noted)
    for drafter, options in (
        (asking(EmptyDrafter(), feature_layers=()), None),
        (asking(EmptyDrafter()), [RequestOptions(speculate=False)]),
    ):
        make_llm(drafter, 4).generate([PROMPTS[0]], GREEDY, options)
        assert all(result.features is None for result in drafter.results)
    make_llm().generate([PROMPTS[0]], GREEDY)
    assert set(map(tuple, asked)) == {()}


def test_a_request_that_opts_out_is_told_nothing_beside_one_that_does_not(make_llm):
    drafter = asking(EmptyDrafter())
    each = [RequestOptions(speculate=False), RequestOptions()]
    make_llm(drafter, 4).generate(PROMPTS[:2], GREEDY, each)
    by_length = {len(r.rows): r.features is None for r in drafter.results if len(r.rows) > 1}
    assert by_length == {len(PROMPTS[0]): True, len(PROMPTS[1]): False}


def test_the_memory_of_what_is_not_read_yet_is_paid_for(make_llm):
    plain = make_llm(EmptyDrafter(), 4)
    asks = make_llm(asking(EmptyDrafter()), 4)
    assert plain.draft_working_bytes == 0
    rows = asks.config.max_num_seqs + 2 * asks.config.max_num_batched_tokens
    assert asks.draft_working_bytes == rows * 3 * 32 * 8
    assert "the drafter remembers up to" in asks.capacity_line()


def test_each_member_of_a_combination_is_told_what_it_asks_for(make_llm, target):
    first = asking(EmptyDrafter(), feature_layers=(1, 2))
    second = asking(EmptyDrafter(), feature_layers=(2, HEAD_INPUT))
    third = asking(EmptyDrafter(), feature_layers=())
    drafter = CombinedDrafter(target, [first, second, third])
    assert drafter.capabilities.feature_layers == (1, 2, HEAD_INPUT)
    (output,) = make_llm(drafter, 4).generate([PROMPTS[1]], replace(GREEDY, max_tokens=4))
    count = len(output.prompt_token_ids)
    for member in (first, second):
        want = features_of(target, output.prompt_token_ids, member.capabilities.feature_layers)
        torch.testing.assert_close(member.results[0].features, want[:count], rtol=0, atol=1e-10)
    assert third.results[0].features is None


def test_depths_that_members_have_passed_are_refused(target):
    asks = asking(EmptyDrafter(), feature_layers=(0,))
    with pytest.raises(ConfigError, match="hidden states at depth 0"):
        CombinedDrafter(target, [asks, {"method": "early_exit", "exit_layer": 1}])


def run(model, depths, resumes=None):
    cache = new_cache(model.config, 1, 8, model.dtype, model.device)
    batch = FlatBatch([3, 1, 4, 1], [Segment(0, 4, (), [0])], [3], resumes or {}, depths)
    return model.model.run(batch, cache)


def test_depths_of_a_pass(target):
    output = run(target, (0, 1, 2, HEAD_INPUT))
    embedded, first, last, read = output.features.chunk(4, dim=1)
    torch.testing.assert_close(embedded, target.model.embed([3, 1, 4, 1]), rtol=0, atol=0)
    torch.testing.assert_close(read[3:], output.hidden, rtol=0, atol=0)
    torch.testing.assert_close(target.model.head(last).logits[3:], output.logits)
    assert not torch.equal(first, last)
    assert run(target, ()).features is None


@pytest.mark.parametrize("depth", [3, -2])
def test_depths_that_the_target_has_not_are_refused(target, depth):
    with pytest.raises(ValueError, match=f"features at depth {depth}"):
        run(target, (0, depth))


def test_depths_that_a_resumed_pass_is_behind_are_refused(target):
    resumes = {0: LayerResume(1, target.model.embed([3]))}
    with pytest.raises(ValueError, match=r"features at depth 0 of a pass through 1\.\.2"):
        run(target, (0,), resumes)
    assert run(target, (1,), resumes).features.shape == (4, 32)


@pytest.mark.skipif(not native_available(), reason="the extension is not built")
def test_asking_changes_no_bit_on_the_native_kernels():
    model = tiny_model(seed=2, kernels="native", dtype="bfloat16", vocab_size=32, num_layers=4)
    want, found = run(model, ()), run(model, (0, 2, 3, HEAD_INPUT))
    assert torch.equal(want.logits, found.logits)
    assert torch.equal(want.hidden, found.features[3:, -32:])


def test_no_more_is_asked_for_than_the_target_has(target):
    class Deep(EmptyDrafter):
        capabilities = Capabilities(feature_layers=(9,))

    with pytest.raises(ConfigError, match=r"features at depth 9 .* 0\.\.2"):
        LLM(target, drafter=Deep())
