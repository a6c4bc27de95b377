"""Chat templates, rendered in a sandbox, with users' words kept apart from the template's.

Knows templates, messages and the strings of control tokens; knows no token id. A control token in
the result always comes from the template: text that a message brought never becomes one.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from foredraft.core.errors import InvalidRequest, ModelError
from foredraft.models.chat_messages import Message, checked_messages, texts_in
from foredraft.models.template_sandbox import Refusal, TemplateEnvironment, render

Tools = Sequence[Mapping[str, Any]]
# Names of fields: templates look them up, so nothing is put into them.
_FIELD = re.compile(r"[A-Za-z_$][A-Za-z0-9_$-]*")
# Templates compare these, which are words of JSON schema and not a user's.
_TYPES = frozenset(
    ("function", "object", "array", "string", "number", "integer", "boolean", "null")
)
_PRIVATE_USE = range(0xF0000, 0xFFFFE)
MAX_SOURCE = 2**20  # characters of a template


@dataclass(frozen=True, slots=True)
class ControlToken:
    """A control token's text and whether it swallows the white space before and after it."""

    text: str
    lstrip: bool = False
    rstrip: bool = False


@dataclass(frozen=True, slots=True)
class Control:
    """A control token at its place in a text, between ordinary pieces (plain `str`)."""

    text: str


Piece = str | Control


class ControlSplitter:
    """Finds control tokens in text that may hold them: the longest at each place, left to right."""

    def __init__(self, tokens: Sequence[ControlToken]) -> None:
        self._tokens = {token.text: token for token in tokens if token.text}
        self.texts = sorted(self._tokens, key=len, reverse=True)
        self.first_characters = frozenset(text[0] for text in self.texts)
        self._lengths = sorted({len(text) for text in self.texts}, reverse=True)
        self._starts = re.compile("|".join(map(re.escape, sorted(self.first_characters))))

    def split(self, text: str) -> list[Piece]:
        """`text` cut at its control tokens; no empty pieces."""
        pieces: list[Piece] = []
        at = 0
        for start in self._starts.finditer(text) if self.texts else ():
            token = None if start.start() < at else self._token_at(text, start.start())
            if token is None:
                continue
            before = text[at : start.start()]
            if token.lstrip:
                before = before.rstrip()
            if before:
                pieces.append(before)
            pieces.append(Control(token.text))
            at = start.start() + len(token.text)
            while token.rstrip and text[at : at + 1].isspace():
                at += 1
        if at < len(text):
            pieces.append(text[at:])
        return pieces

    def _token_at(self, text: str, start: int) -> ControlToken | None:
        """The longest control token that begins at `start`. Some vocabularies have thousands."""
        for length in self._lengths:
            token = self._tokens.get(text[start : start + length])
            if token is not None:
                return token
        return None


class ChatTemplate:
    """A compiled template. `variables` are the strings it may use (`bos_token`, `eos_token`, ...).

    How text is kept apart: a mark, a character that occurs in no message, is put inside every
    control token's text in a message; the template is rendered; a control token found there has no
    mark inside, so the template wrote it; the marks are taken out. A message without such text goes
    through unchanged, so templates may trim, cut, search and count it.
    Text may also *become* a control token, where the template deletes what is between its parts or
    joins it with its own. So messages that hold a part of one are rendered a second time, with
    marks at every such part; if the control tokens differ, the second rendering is taken.
    Tools and tool calls are treated alike, in all their texts.
    Limit: a template that searches or counts a message with a control token's text sees the marks.

    Raises ModelError for a template that does not compile, or, later, fails.
    """

    def __init__(
        self, source: str, variables: Mapping[str, str], splitter: ControlSplitter
    ) -> None:
        self.source = source
        self._variables = dict(variables)
        self._splitter = splitter
        self._tails = tuple({text[i:] for text in splitter.texts for i in range(1, len(text))})
        if len(source) > MAX_SOURCE:
            raise ModelError(f"chat template has {len(source)} characters, at most {MAX_SOURCE}")
        try:
            self._template = TemplateEnvironment().from_string(source)
        except RecursionError as error:
            raise ModelError("chat template is nested too deeply") from error
        except Exception as error:  # also what Python's own compiler says to jinja2's code
            raise ModelError(f"chat template does not compile: {_one_line(error)}") from error

    def render(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool = True,
        tools: Tools | None = None,
    ) -> str:
        """The text of a conversation, nothing kept apart. Raises as `pieces` does."""
        return self._render(checked_messages(messages), tools, add_generation_prompt)

    def pieces(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool = True,
        tools: Tools | None = None,
    ) -> list[Piece]:
        """Ordinary text and the template's control tokens, in order. `tools`: what the template
        knows by that name, lists and objects of texts, numbers, truth values and None.

        Raises InvalidRequest for messages that are malformed or that the template refuses,
        ModelError for a template that fails.
        """
        checked = checked_messages(messages)
        told = [{**message, "role": ""} for message in checked]  # roles have no need of marks
        texts = set(texts_in([told, list(tools or ())]))
        mark = _absent_character([*texts, self.source])
        whole = {text: self._whole_tokens(text) for text in texts}
        partly = {text: places | self._part_tokens(text) for text, places in whole.items()}

        def rendered(places: Mapping[str, set[int]]) -> list[Piece]:
            """The rendering with marks at the places of each text, cut at its control tokens."""

            def put(text: str) -> str:
                return _insert(text, places[text], mark)

            def put_in_key(key: str) -> str:
                return _insert(key, (whole if _FIELD.fullmatch(key) else places)[key], mark)

            marked = [
                {**_mapped(message, put, put_in_key), "role": original["role"]}
                for message, original in zip(told, checked, strict=True)
            ]
            marked_tools = None if tools is None else _mapped(list(tools), put, put_in_key)
            return self._splitter.split(self._render(marked, marked_tools, add_generation_prompt))

        found = rendered(whole)
        if partly != whole:
            strict = rendered(partly)
            found = found if _controls(found) == _controls(strict) else strict
        unmarked = [p.replace(mark, "") if isinstance(p, str) else p for p in found]
        return [piece for piece in unmarked if piece]

    def _whole_tokens(self, content: str) -> set[int]:
        """Behind the first character of every control token in `content`, overlapping ones too."""
        places: set[int] = set()
        if self._splitter.first_characters.isdisjoint(content):
            return places
        for text in self._splitter.texts:
            at = content.find(text)
            while at >= 0:
                places.add(at + 1)
                at = content.find(text, at + 1)
        return places

    def _part_tokens(self, content: str) -> set[int]:
        """Where a control token could begin, go through or end if other text were put there."""
        first = self._splitter.first_characters
        places = {i + 1 for i, character in enumerate(content) if character in first}
        start, end = len(content) - len(content.lstrip()), len(content.rstrip())
        if self._is_part(content[start:end]):
            places |= {start, end}
        for edge in {0, start}:
            if content.startswith(self._tails, edge):
                places.add(edge)
        return places

    def _is_part(self, text: str) -> bool:
        """Whether `text` is a proper part of a control token."""
        return text != "" and any(text in whole and text != whole for whole in self._splitter.texts)

    def _render(
        self, messages: Sequence[Message], tools: Tools | None, add_generation_prompt: bool
    ) -> str:
        variables = {
            "messages": messages,
            "add_generation_prompt": add_generation_prompt,
            "tools": tools,
            "documents": None,
            **self._variables,
        }
        try:
            return render(self._template, variables)
        except Refusal as error:
            raise InvalidRequest(f"chat template refuses: {_one_line(error)}") from error
        except Exception as error:  # a template is a program: it can fail in any way
            raise ModelError(
                f"chat template failed on these messages ({type(error).__name__}: "
                f"{_one_line(error)})"
            ) from error


def _mapped(value: Any, text: Callable[[str], str], key: Callable[[str], str]) -> Any:
    """`value` with `text` of all its texts and `key` of all its keys."""
    if isinstance(value, str):
        return text(value)
    if isinstance(value, Mapping):
        return {
            key(name): each
            if name == "type" and isinstance(each, str) and each in _TYPES
            else _mapped(each, text, key)
            for name, each in value.items()
        }
    if isinstance(value, list | tuple):
        return [_mapped(each, text, key) for each in value]
    return value


def _insert(content: str, places: set[int], mark: str) -> str:
    bounds = [0, *sorted(places), len(content)]
    return mark.join(content[a:b] for a, b in itertools.pairwise(bounds))


def _absent_character(texts: Sequence[str]) -> str:
    used = set().union(*texts)
    for code in _PRIVATE_USE:
        if chr(code) not in used:
            return chr(code)
    raise InvalidRequest("the messages use up all private-use characters")


def _controls(pieces: Sequence[Piece]) -> list[str]:
    return [piece.text for piece in pieces if isinstance(piece, Control)]


def _one_line(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return text if len(text) <= 300 else f"{text[:297]}..."
