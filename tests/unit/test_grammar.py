"""Grammars by themselves: what they are made of, what they allow, and what is refused."""

from __future__ import annotations

import json
import re
import time
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from foredraft.core.errors import InvalidRequest
from foredraft.core.structured_outputs import StructuredOutputs
from foredraft.grammar import checking
from foredraft.grammar.compiler import GrammarCompiler, compiler_of
from foredraft.grammar.guide import Guide, draft_mask
from foredraft.grammar.matcher import GrammarMatcher

WORDS = (
    *(bytes([byte]) for byte in range(32, 127)),
    b"\n",
    b"true",
    b"false",
    b'{"',
    b'":',
    b'",',
    b'"}',
    b"ab",
    b"abc",
    b"bc",
    b"name",
    b"na",
    b"\xc3",
    b"\xa4",
    b"",
)
END, STOP = len(WORDS), len(WORDS) + 1
VOCAB = len(WORDS) + 4  # ids behind the tokenizer's stand for nothing


class Source:
    """A tokenizer of `WORDS`, longest first, and two control tokens."""

    control_ids = frozenset({END, STOP})

    def token_bytes(self, token_id: int, skip_special_tokens: bool = True) -> bytes:
        if token_id in self.control_ids:
            return b"" if skip_special_tokens else b"<end>"
        return WORDS[token_id] if token_id < len(WORDS) else b""

    def encode(self, text: str) -> list[int]:
        data, ids = text.encode(), []
        while data:
            word = max((w for w in WORDS if w and data.startswith(w)), key=len)
            ids.append(WORDS.index(word))
            data = data[len(word) :]
        return ids


SOURCE = Source()
COMPILER = GrammarCompiler(SOURCE, VOCAB)
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "old": {"type": "boolean"}},
    "required": ["name", "old"],
    "additionalProperties": False,
}
GRAMMARS = [
    StructuredOutputs(json=PERSON),
    StructuredOutputs(json=PERSON, disable_any_whitespace=True),
    StructuredOutputs(json_object=True),
    StructuredOutputs(regex=r"(abc|ab|bc){2,5}ä?"),
    StructuredOutputs(choice=["abc", "abcabc", "a|b", "true\n", "näh"]),
    StructuredOutputs(grammar='start: "{" start "}" | /[abc]{0,3}/'),
]


def matcher(structured: StructuredOutputs, ends: tuple[int, ...] = (END,)) -> GrammarMatcher:
    return COMPILER.compile(structured).matcher(ends)


def text(tokens: list[int]) -> str:
    return b"".join(SOURCE.token_bytes(t) for t in tokens).decode(errors="replace")


def told(matcher: GrammarMatcher, tokens: str) -> GrammarMatcher:
    for token in SOURCE.encode(tokens):
        assert matcher.accept(token)
    return matcher


def allowed(matcher: GrammarMatcher) -> list[int]:
    return matcher.mask().nonzero().flatten().tolist()


@pytest.mark.parametrize("structured", GRAMMARS, ids=lambda s: s.kind)
def test_whatever_follows_the_mask_keeps_to_the_grammar(structured):
    """Walks that take the allowed tokens in turn; of all of them the end is reached by some."""
    ended = 0
    for start in range(40):
        at, tokens = matcher(structured), []
        for step in range(60):
            choices = allowed(at)
            if not choices:
                break
            token = choices[(start * 7 + step * (start + 3)) % len(choices)]
            assert at.accept(token)
            tokens.append(token)
        if at.can_end:
            ended += 1
            said = text(tokens)
            if structured.kind == "json":
                value = json.loads(said)
                assert set(value) == {"name", "old"}
                assert type(value["old"]) is bool
            elif structured.kind == "choice":
                assert said in (structured.choice or ())
            elif structured.kind == "regex":
                assert re.fullmatch(str(structured.regex), said)
            elif structured.kind == "grammar":
                assert re.fullmatch(r"\{*[abc]{0,3}\}*", said)
                assert said.count("{") == said.count("}")
    assert ended or structured.kind == "json_object"


def test_the_end_is_allowed_where_the_answer_may_be_over_and_nowhere_else():
    at = matcher(StructuredOutputs(regex="a{2}b*"), (END, STOP, 10**6))
    assert not at.accept(END)
    told(at, "a")
    assert not {END, STOP} & set(allowed(at))
    told(at, "a")
    assert {END, STOP} <= set(allowed(at))
    assert at.can_end
    assert not at.is_complete
    assert at.accept(STOP)
    assert at.is_complete
    assert allowed(at) == []
    assert not at.accept(SOURCE.encode("b")[0])
    at.rollback(1)
    assert {END, STOP} <= set(allowed(told(at, "b")))


def test_nothing_follows_a_grammar_that_is_complete():
    at = told(matcher(StructuredOutputs(choice=["abc"]), ()), "abc")
    assert at.is_complete
    assert allowed(at) == []
    with pytest.raises(ValueError, match="2 tokens can't be taken back of 1"):
        at.rollback(2)


def test_control_tokens_are_no_text():
    for structured in (StructuredOutputs(regex="[<>a-z]+"), StructuredOutputs(json_object=True)):
        at = matcher(structured, (STOP,))
        assert END not in allowed(at)
        assert not at.accept(END)
        assert not at.accept(VOCAB - 1)
        assert not at.accept(-1)


def test_forced_tokens_are_the_only_ones_allowed():
    at = matcher(StructuredOutputs(json=PERSON, disable_any_whitespace=True))
    forced = at.forced(20)
    assert text(forced).startswith('{"name')  # what comes next may be spelled in several ways
    assert at.forced(2) == forced[:2]
    assert at.forced(0) == []
    assert at.num_tokens == 0
    for token in forced:
        assert allowed(at) == [token]
        at.accept(token)
    assert at.forced(5) == []


def test_a_guide_goes_from_branch_to_branch():
    at = told(matcher(StructuredOutputs(regex="a(b|c)(d|e)")), "a")
    guide = Guide(at)
    b, c, d, z = (SOURCE.encode(x)[0] for x in "bcdz")
    for path in ([], [b], [b, d], [c, d], [c], [b], [b, d, z], [], [z], [z, d], [c, d]):
        followed = path in ([], [b], [b, d], [c, d], [c])
        assert guide.follows(path) is followed
        mask = guide.mask(path)
        if not followed:
            assert mask is None
        else:
            alone = at.fork()
            assert all(alone.accept(token) for token in path)
            assert mask is not None
            assert mask.tolist() == alone.mask().tolist()
    assert at.num_tokens == 1
    assert draft_mask(None, [], at.mask().device) is None


class Walks(RuleBasedStateMachine):
    """Forks and rollbacks against the same tokens accepted from the start."""

    def __init__(self) -> None:
        super().__init__()
        self.structured = GRAMMARS[0]
        self.walks: list[tuple[GrammarMatcher, list[int]]] = [(matcher(self.structured), [])]

    @precondition(lambda self: len(self.walks) == 1 and not self.walks[0][1])
    @rule(structured=st.sampled_from(GRAMMARS))
    def begin(self, structured: StructuredOutputs) -> None:
        self.structured = structured
        self.walks = [(matcher(structured), [])]

    @rule(which=st.integers(0, 9), pick=st.integers(0, 10_000), looks=st.booleans())
    def accept_allowed(self, which: int, pick: int, looks: bool) -> None:
        at, tokens = self.walks[which % len(self.walks)]
        if looks:
            at.forced(4)
        choices = allowed(at)
        if choices:
            token = choices[pick % len(choices)]
            assert at.accept(token)
            tokens.append(token)

    @rule(which=st.integers(0, 9), token=st.integers(0, VOCAB - 1))
    def accept_any(self, which: int, token: int) -> None:
        at, tokens = self.walks[which % len(self.walks)]
        if at.accept(token):
            tokens.append(token)

    @rule(which=st.integers(0, 9), share=st.floats(0, 1))
    def rollback(self, which: int, share: float) -> None:
        at, tokens = self.walks[which % len(self.walks)]
        count = round(share * len(tokens))
        at.rollback(count)
        del tokens[len(tokens) - count :]

    @precondition(lambda self: len(self.walks) < 5)
    @rule(which=st.integers(0, 9))
    def fork(self, which: int) -> None:
        at, tokens = self.walks[which % len(self.walks)]
        self.walks.append((at.fork(), list(tokens)))

    @invariant()
    def all_are_where_their_tokens_lead(self) -> None:
        for at, tokens in self.walks:
            again = matcher(self.structured)
            assert all(again.accept(token) for token in tokens)
            assert at.num_tokens == len(tokens)
            assert (at.can_end, at.is_complete) == (again.can_end, again.is_complete)
            assert at.mask().tolist() == again.mask().tolist()
            forced = at.forced(3)
            assert forced == again.forced(3)
            if forced:
                assert allowed(at) == forced[:1]


Walks.TestCase.settings = settings(max_examples=25, stateful_step_count=15, deadline=None)
test_forks_and_rollbacks = Walks.TestCase


def refused(structured: StructuredOutputs) -> str:
    with pytest.raises(InvalidRequest) as error:
        COMPILER.compile(structured)
    message = str(error.value)
    assert message.startswith(f"structured_outputs.{structured.kind} ")
    assert len(message) < 300
    return message


@pytest.mark.parametrize(
    ("structured", "words"),
    [
        (StructuredOutputs(regex="ab[c"), "at character 3 of the expression: unclosed character"),
        (StructuredOutputs(regex=r"(a)\1"), "at character 4 .* backreferences are not supported"),
        (StructuredOutputs(regex=r"[^\s\S]"), "nothing can satisfy it"),
        (StructuredOutputs(json=False), "nothing can satisfy it"),
        (StructuredOutputs(json={"type": "what"}), "what"),
        (StructuredOutputs(json={"not": {"type": "null"}}), 'Unimplemented keys: ."not"'),
        (StructuredOutputs(json={"type": "string", "pattern": "(a"}), "unclosed group"),
        (StructuredOutputs(json={"$ref": "#"}), "nothing can satisfy it"),
        (StructuredOutputs(json={"$ref": "http://localhost/x"}), "http://localhost/x"),
        (StructuredOutputs(grammar='start: "a" b'), 'line 1, column 8: unknown name: "b"'),
        (StructuredOutputs(grammar='start: "a'), "line 1, column 10: lexer error"),
        (StructuredOutputs(grammar='begin: "a"'), "start"),
    ],
)
def test_bad_grammars_are_refused_with_place_and_reason(structured, words):
    assert re.search(words, refused(structured))


def deep(depth: int) -> dict[str, Any]:
    names = {f"a{i}": {"$ref": f"#/$defs/a{i + 1}"} for i in range(depth)}
    return {"$defs": names | {f"a{depth}": {"type": "null"}}, "$ref": "#/$defs/a0"}


HOSTILE = {
    "references nested until the stack is full": StructuredOutputs(json=deep(6000)),
    "alternatives that multiply": StructuredOutputs(
        json={
            "allOf": [
                {"oneOf": [{"properties": {f"a{i}": {"const": j}}} for j in range(4)]}
                for i in range(12)
            ]
        }
    ),
    "rules nested until the stack is full": StructuredOutputs(
        grammar="start: a0\n" + "\n".join(f"a{i}: a{i + 1}" for i in range(9000)) + '\na9000: "x"'
    ),
    "terminals that double": StructuredOutputs(
        grammar="start: A0\n"
        + "\n".join(f"A{i}: A{i + 1} A{i + 1}" for i in range(60))
        + '\nA60: "x"'
    ),
    "parentheses": StructuredOutputs(grammar="start: " + "(" * 9000 + '"a"' + ")" * 9000),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_grammars_are_refused_in_bounded_time(name):
    begin = time.perf_counter()
    refused(HOSTILE[name])
    assert time.perf_counter() - begin < checking.WALL_SECONDS + 10


@pytest.mark.parametrize(
    "structured",
    [
        StructuredOutputs(regex=r"((((a{1000}){1000}){1000}){1000}){1000}"),
        StructuredOutputs(regex=r"(.*a.{1000})"),
        StructuredOutputs(regex=r"(a*)*(a|aa)+b"),
        StructuredOutputs(json={"enum": [f"word{i}" for i in range(5000)]}),
        StructuredOutputs(json={"properties": {f"p{i}": {} for i in range(1000)}}),
        StructuredOutputs(json={"type": "array", "minItems": 10**6, "items": {"type": "null"}}),
        StructuredOutputs(grammar='start: start start | "a" | '),
    ],
)
def test_costly_grammars_are_followed_or_given_up_never_waited_for(structured):
    try:
        at = matcher(structured)
        for _ in range(50):
            choices = allowed(at)
            if not choices or not at.accept(choices[0]):
                break
    except InvalidRequest as error:
        assert "can't be" in str(error)  # noqa: PT017 - either is right


def test_a_process_that_takes_too_long_is_ended(monkeypatch):
    monkeypatch.setattr(checking, "WALL_SECONDS", 0.001)
    structured = StructuredOutputs(grammar='start: "late"')
    with pytest.raises(InvalidRequest, match=r"not compiled within 0\.001 seconds"):
        COMPILER.compile(structured)
    monkeypatch.undo()
    COMPILER.compile(structured)  # nothing was kept of it


def test_grammars_are_compiled_once(monkeypatch):
    compiler = GrammarCompiler(SOURCE, VOCAB)
    first = compiler.compile(GRAMMARS[0])
    monkeypatch.setattr(GrammarCompiler, "_make", lambda *_: pytest.fail("compiled again"))
    assert compiler.compile(StructuredOutputs(json=json.dumps(PERSON, indent=2))) is first


def test_engines_of_one_model_share_a_compiler():
    held = compiler_of(SOURCE, VOCAB)
    assert compiler_of(SOURCE, VOCAB) is held
    assert compiler_of(SOURCE, VOCAB - 1) is not held
    assert compiler_of(Source(), VOCAB) is not held


def test_the_vocabulary_is_split_as_the_tokenizer_splits_or_by_its_longest_tokens():
    class Spaced(Source):
        def encode(self, text: str) -> list[int]:
            return super().encode(f" {text}")

    source = Spaced()
    at = GrammarCompiler(source, VOCAB).compile(StructuredOutputs(choice=["abcname!"]))
    assert text(at.matcher(()).forced(9)) == "abcname!"
