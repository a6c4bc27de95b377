"""Which tokens end a generation.

Knows the few strings by which chat models end a turn; knows no file.
"""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import Tokenizer as Backend

# A file's EOS is often the end of a document; a turn ends with the template's own token.
TURN_ENDS = ("<|im_end|>", "<|eot_id|>", "<|end|>", "<end_of_turn>", "<|end_of_turn|>")


def generation_ends(backend: Backend, ids: Sequence[int], template: str | None) -> list[int]:
    """`ids`, and the turn's end where the vocabulary has it as a control token and the template
    writes it.
    """
    ends = set(ids)
    added = backend.get_added_tokens_decoder()
    for index, token in added.items():
        if token.special and token.content in TURN_ENDS and token.content in (template or ""):
            ends.add(index)
    return sorted(ends)
