"""From what a request asks for to a grammar that a model's answers can be held to.

Knows the kinds of structured output, llguidance and one vocabulary; knows no request. Compiled
grammars are kept by what they were made of, the vocabulary by the tokenizer it was read from.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable
from weakref import WeakValueDictionary

from llguidance import LLMatcher

from foredraft.core.errors import InvalidRequest
from foredraft.core.structured_outputs import StructuredOutputs
from foredraft.grammar.checking import check_size, described, fault_in_process, is_harmless
from foredraft.grammar.limits import parser_limits
from foredraft.grammar.matcher import GrammarMatcher
from foredraft.grammar.vocabulary import GrammarVocabulary, TokenSource

MOST_KEPT = 64  # grammars, of a model
# Blanks between JSON's tokens: as many as a person would write. Were there no end of them, a model
# could spend its whole answer on them.
BLANKS = r"[ \t\n\r]{0,16}"
ANY_OBJECT = '{"type":"object"}'
_SPECIAL = frozenset("\\.+*?()|[]{}^$/#&-~")


class CompiledGrammar:
    """A grammar of one vocabulary, at its start."""

    def __init__(self, matcher: LLMatcher, vocabulary: GrammarVocabulary) -> None:
        self._matcher = matcher
        self._vocabulary = vocabulary

    def matcher(self, end_ids: Iterable[int]) -> GrammarMatcher:
        """For one answer, ended by any of `end_ids`."""
        return GrammarMatcher(
            self._matcher.deep_copy(), self._vocabulary.vocab_size, sorted(end_ids)
        )


class GrammarCompiler:
    """Compiles for one model; any thread may ask."""

    def __init__(self, source: TokenSource, vocab_size: int) -> None:
        self._source = source
        self._vocab_size = vocab_size
        self._lock = threading.Lock()  # of what is kept
        self._reading = threading.Lock()  # of the vocabulary
        self._vocabulary: GrammarVocabulary | None = None
        self._kept: OrderedDict[StructuredOutputs, CompiledGrammar | str] = OrderedDict()

    def compile(self, structured: StructuredOutputs) -> CompiledGrammar:
        """The grammar of `structured`, compiled where nobody has asked for it lately.

        Raises InvalidRequest, with the place and the reason, for what is no grammar, what nothing
        can satisfy, what llguidance can't honour, and what is too large to compile.
        """
        with self._lock:
            made = self._kept.pop(structured, None)
            if made is not None:
                self._kept[structured] = made
        if made is None:
            made = self._make(structured)  # not under the lock: it may take seconds
            with self._lock:
                made = self._kept.setdefault(structured, made)
                while len(self._kept) > MOST_KEPT:
                    self._kept.popitem(last=False)
        if isinstance(made, str):
            raise InvalidRequest(f"structured_outputs.{structured.kind} can't be used: {made}")
        return made

    def _make(self, structured: StructuredOutputs) -> CompiledGrammar | str:
        """The grammar, or why there is none."""
        check_size(structured)
        try:
            grammar = grammar_of(structured)
        except ValueError as error:
            return described(str(error))
        if not is_harmless(structured):
            fault = fault_in_process(grammar)
            if fault:
                return described(fault)
        with self._reading:
            if self._vocabulary is None:
                self._vocabulary = GrammarVocabulary(self._source, self._vocab_size)
            vocabulary = self._vocabulary
        limits = parser_limits()
        matcher = LLMatcher(vocabulary.tokenizer, grammar, log_level=0, limits=limits)
        if not matcher.is_error():
            first = matcher.compute_bitmask()
            if not matcher.is_error():
                return CompiledGrammar(matcher, vocabulary) if any(first) else "nothing fits it"
        return described(matcher.get_error())


def grammar_of(structured: StructuredOutputs) -> str:
    """The grammar in llguidance's own form."""
    kind = structured.kind
    if kind in ("json", "json_object"):
        schema = ANY_OBJECT if kind == "json_object" else str(structured.json)
        if schema == "false":
            raise ValueError("nothing can satisfy it")
        if schema == "true":
            schema = "{}"
        if structured.disable_any_whitespace:
            return LLMatcher.grammar_from_json_schema(
                schema, overrides={"whitespace_flexible": False}
            )
        return LLMatcher.grammar_from_json_schema(schema, defaults={"whitespace_pattern": BLANKS})
    if kind == "regex":
        return LLMatcher.grammar_from_regex(str(structured.regex))
    if kind == "choice":
        return LLMatcher.grammar_from_regex("|".join(map(_literal, structured.choice or ())))
    return LLMatcher.grammar_from_lark(str(structured.grammar))


def _literal(text: str) -> str:
    """A regular expression of `text` alone."""
    return "".join(
        f"\\{c}" if c in _SPECIAL else f"\\x{{{ord(c):x}}}" if c.isspace() else c for c in text
    )


_COMPILERS: WeakValueDictionary[tuple[int, int], GrammarCompiler] = WeakValueDictionary()
_COMPILERS_LOCK = threading.Lock()


def compiler_of(source: TokenSource, vocab_size: int) -> GrammarCompiler:
    """The one compiler of a tokenizer and its model's number of ids, for all who hold it."""
    key = id(source), vocab_size  # nobody else's: a compiler keeps its source alive
    with _COMPILERS_LOCK:
        compiler = _COMPILERS.get(key)
        if compiler is None:
            compiler = _COMPILERS[key] = GrammarCompiler(source, vocab_size)
        return compiler
