"""Law 3 on the native kernels: not the tokens alone, every committed token's logits agree to the
bit.
"""

from __future__ import annotations

import hashlib

import pytest

from foredraft import LLM
from foredraft.drafters.ngram import NgramDrafter
from foredraft.kernels.catalog import native_available
from foredraft.testing.drafters import LiarDrafter, OracleDrafter, TreeDrafter, WrongAtDrafter
from foredraft.testing.models import tiny_model

from .conftest import GREEDY, PROMPTS, SEEDED

pytestmark = pytest.mark.skipif(not native_available(), reason="built without a C++ compiler")

BOTH = pytest.mark.parametrize("params", [GREEDY, SEEDED], ids=["greedy", "coupled"])


class Trace:
    """Hashes of the logits behind every committed token, by request and position."""

    def __init__(self, model, **options):
        self.rows = {}
        self.llm = LLM(model, tap=self._note, **({"seed": 5, "page_size": 4} | options))

    def _note(self, request_id, position, token, row):
        digest = hashlib.sha256(row.contiguous().numpy().tobytes()).hexdigest()
        self.rows[request_id, position] = (token, digest)

    def run(self, prompts, params):
        outputs = self.llm.generate(prompts, params)
        return [
            [
                self.rows[output.request_id, len(output.prompt_token_ids) + i]
                for i in range(len(output.token_ids))
            ]
            for output in outputs
        ]


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def model(request):
    return tiny_model(seed=7, vocab_size=32, kernels="native", dtype=request.param)


@pytest.fixture(scope="module")
def baseline(model):
    def run(params):
        return [Trace(model).run([prompt], params)[0] for prompt in PROMPTS]

    return run


def known(baseline_rows):
    return OracleDrafter(
        {
            tuple(prompt): [token for token, _ in rows]
            for prompt, rows in zip(PROMPTS, baseline_rows, strict=True)
        }
    )


@BOTH
@pytest.mark.parametrize("width", [1, 2, 5, 9])
def test_drafts_leave_the_logits_as_they_are(model, baseline, params, width):
    """Faults 13, 14: rows of a window stand at the same positions and give the same numbers."""
    want = baseline(params)
    oracle = known(want)
    wrong = [WrongAtDrafter(oracle, k) for k in range(width)]
    for drafter in (oracle, *wrong, LiarDrafter(oracle), NgramDrafter(prompt_lookup_min=1)):
        trace = Trace(model, drafter=drafter, speculative_config={"num_speculative_tokens": width})
        assert trace.run(PROMPTS, params) == want


@BOTH
def test_the_branch_of_a_tree_gives_the_numbers_of_a_chain(model, baseline, params):
    want = baseline(params)
    oracle = known(want)
    drafter = TreeDrafter(LiarDrafter(oracle), WrongAtDrafter(oracle, 2), oracle)
    trace = Trace(model, drafter=drafter, speculative_config={"num_speculative_tokens": 9})
    assert trace.run(PROMPTS, params) == want


@BOTH
@pytest.mark.parametrize("chunk", [1, 2, 5, 64])
@pytest.mark.parametrize("page_size", [1, 3, 16])
def test_chunks_and_pages_leave_the_logits_as_they_are(model, baseline, params, chunk, page_size):
    want = baseline(params)
    trace = Trace(
        model,
        drafter=known(want),
        speculative_config={"num_speculative_tokens": 3},
        prefill_chunk_size=chunk,
        page_size=page_size,
    )
    assert trace.run(PROMPTS, params) == want


@BOTH
@pytest.mark.parametrize("page_size", [1, 3, 8])
def test_found_prefixes_leave_the_logits_as_they_are(model, baseline, params, page_size):
    """Prompts computed in chunks, or said as answers behind drafts, and found by a second turn."""
    first = baseline(params)
    second = [
        [*prompt, *(token for token, _ in rows), 30, 29]
        for prompt, rows in zip(PROMPTS, first, strict=True)
    ]
    want = [Trace(model, enable_prefix_caching=False).run([prompt], params)[0] for prompt in second]
    trace = Trace(
        model,
        drafter=known(first),
        speculative_config={"num_speculative_tokens": 5},
        prefill_chunk_size=3,
        page_size=page_size,
    )
    assert trace.run(PROMPTS, params) == first
    assert trace.run(PROMPTS, params) == first
    assert trace.run(second, params) == want
    assert trace.llm.engine.scheduler.prefix_hit_tokens > 0


@BOTH
def test_threads_leave_the_logits_as_they_are(baseline, params, model):
    dtype = str(model.dtype).removeprefix("torch.")
    rows = {
        threads: [
            Trace(
                tiny_model(
                    seed=7, vocab_size=32, kernels="native", dtype=dtype, num_threads=threads
                )
            ).run([prompt], params)[0]
            for prompt in PROMPTS
        ]
        for threads in (1, 2)
    }
    assert rows[1] == rows[2] == baseline(params)
