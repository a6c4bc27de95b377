"""The process that tries a grammar before anybody else does: `python -m
foredraft.grammar.check_process`, a grammar on stdin, what is wrong with it on stdout.

A grammar can be so deep that its compiler overruns the stack, or so large that it takes minutes:
here that ends a process that nobody needs. Knows llguidance and a vocabulary of single bytes.
"""

from __future__ import annotations

import resource
import sys
import threading

from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from foredraft.grammar.limits import parser_limits

CPU_SECONDS = 2  # of everything here; then the system ends the process
MEMORY_BYTES = 2 << 30
# Less than threads have elsewhere, so that what fits here fits there.
STACK_BYTES = 2 << 20
END = 256  # the id behind all bytes


class _Bytes:
    """A vocabulary of all single bytes."""

    eos_token_id = END
    bos_token_id = None
    tokens = (*(bytes([value]) for value in range(END)), b"<end>")
    special_token_ids = (END,)

    def __call__(self, text: str | bytes) -> list[int]:
        return list(text if isinstance(text, bytes) else text.encode())


def fault_of(grammar: str) -> str:
    """llguidance's message; empty where the grammar and its first mask can be had."""
    tokenizer = LLTokenizer(TokenizerWrapper(_Bytes()), n_vocab=END + 1, eos_token=END)
    matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=parser_limits())
    if not matcher.is_error():
        matcher.compute_bitmask()
    return matcher.get_error()


def main() -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    grammar = sys.stdin.buffer.read().decode()
    threading.stack_size(STACK_BYTES)
    thread = threading.Thread(target=lambda: sys.stdout.write(fault_of(grammar)))
    thread.start()
    thread.join()


if __name__ == "__main__":
    main()
