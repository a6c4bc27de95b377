"""Finds tool calls in an answer while it is written.

Knows a format and the names that may be called; knows no token and no event. It goes character by
character, so what it finds can't depend on how the text was cut.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from foredraft.server.tools.formats import ToolFormat

_BLANKS = frozenset(" \t\r\n")
# What JSON has outside its strings, the letters being those of true, false, null and exponents.
_BARE = _BLANKS | frozenset("{}[]:,+-.0123456789truefalsnE")


@dataclass(frozen=True, slots=True)
class Content:
    """Text that belongs to no call."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegins:
    """The `index`-th call, of a function."""

    index: int
    name: str


@dataclass(frozen=True, slots=True)
class Arguments:
    """More of a call's arguments, as the model wrote them."""

    index: int
    text: str


Found = Content | CallBegins | Arguments


class ToolCallParser:
    """For one answer, in its order.

    A call that is complete, names a function that there is, and has an object for arguments is a
    call; all else is content, word for word. White space that no content follows is left out where
    there was a call. `is_held`: a grammar holds calls to their form, so one is told as soon as its
    name is there, and its arguments as they come; else a call is told when it is complete.
    """

    def __init__(self, form: ToolFormat, names: Collection[str], is_held: bool) -> None:
        self.num_calls = 0
        self._form = form
        self._names = frozenset(names)
        self._is_held = is_held
        self._headers = {form.header(name): name for name in names} if is_held else {}
        self._step: Callable[[str], None] = self._text if form.opening else self._start
        self._found: list[Found] = []
        self._blank = ""  # white space that content may follow
        self._pending = ""  # may become an opening, or a closing
        self._raw = ""  # since the opening, or the last call: content, if no call comes of it
        self._object = ""
        self._scan = _Scan()
        self._in_list = False

    @property
    def is_open(self) -> bool:
        """Whether arguments of a call that was told are still to come."""
        return self._step == self._arguments

    def push(self, text: str) -> list[Found]:
        """What `text` adds."""
        for character in text:
            self._step(character)
        return self._taken()

    def finish(self) -> list[Found]:
        """What was kept back: the answer is over. Where calls are held to their form, what it was
        cut off in was to be a call.
        """
        if self._step in (self._text, self._start):
            self._content(self._pending)
        elif not self._is_held:
            self._content(self._raw)
        if self.num_calls == 0:
            self._tell(Content(self._blank))
        return self._taken()

    def _taken(self) -> list[Found]:
        found, self._found = self._found, []
        return found

    def _tell(self, found: Found) -> None:
        """Neighbours of one kind are one."""
        last = self._found[-1] if self._found else None
        if isinstance(found, Content) and isinstance(last, Content):
            self._found[-1] = Content(last.text + found.text)
        elif isinstance(found, Arguments) and isinstance(last, Arguments):
            self._found[-1] = Arguments(found.index, last.text + found.text)
        elif found != Content(""):
            self._found.append(found)

    def _content(self, text: str) -> None:
        kept = text.rstrip()
        if kept:
            self._tell(Content(self._blank + kept))
            self._blank = ""
        self._blank += text[len(kept) :]

    # The states. Each takes one character.

    def _start(self, character: str) -> None:
        """The answer itself may be a call, and nothing but white space has come."""
        self._pending += character
        begun = self._pending.lstrip()
        if begun == "{":
            self._raw, self._pending = self._pending[:-1], ""
            self._before(character)
        elif begun in self._form.openings:
            self._raw, self._pending, self._step = self._pending, "", self._before
        elif not any(opening.startswith(begun) for opening in self._form.openings):
            self._leave(self._pending)

    def _text(self, character: str) -> None:
        openings = self._form.openings if self._form.opening else ()
        self._pending += character
        while not any(opening.startswith(self._pending) for opening in openings):
            self._content(self._pending[0])
            self._pending = self._pending[1:]
            if not self._pending:
                return
        if self._pending in openings:
            self._raw, self._pending, self._step = self._pending, "", self._before

    def _before(self, character: str) -> None:
        """Behind an opening, or a comma of a list: a call is to come, or a list of them."""
        if character == "{":
            self._object, self._scan, self._step = "", _Scan(), self._inside
            self._inside(character)
        elif character in _BLANKS or (character == "[" and not self._in_list):
            self._in_list |= character == "["
            self._raw += character
        else:
            self._give_up(character)

    def _inside(self, character: str) -> None:
        """In a call."""
        ended = self._scan.step(character)
        if ended is None:
            self._give_up(character)
            return
        self._raw += character
        self._object += character
        if self._headers and self._object in self._headers:
            self._begin(self._headers[self._object])
            self._step = self._arguments
        elif ended:
            call = read_call(self._object, self._names)
            if call is None:
                self._give_up("")
                return
            self._begin(call[0])
            self._tell(Arguments(self.num_calls - 1, call[1]))
            self._raw, self._step = "", self._after

    def _arguments(self, character: str) -> None:
        """In the arguments of a call that was told; behind them comes the call's own brace."""
        if self._scan.step(character):
            self._raw, self._step = "", self._after
        elif self._scan.depth > 1 or character == "}":
            self._tell(Arguments(self.num_calls - 1, character))

    def _after(self, character: str) -> None:
        """Behind a call: a closing, the next of a list, or neither."""
        self._raw += character
        if character in _BLANKS and not self._pending:
            return
        self._pending += character
        if self._in_list and self._pending == "]":
            self._in_list = False
            self._raw = self._pending = ""
        elif self._pending in self._separators:
            self._pending, self._step = "", self._before
        elif not self._in_list and self._form.closing.startswith(self._pending):
            if self._pending == self._form.closing:
                self._leave("")
        else:
            self._leave(self._raw)

    @property
    def _separators(self) -> tuple[str, ...]:
        """What may stand between calls where no opening does."""
        return (",",) if self._in_list else () if self._form.opening else (";", ",")

    def _leave(self, rest: str) -> None:
        """To text, which begins with `rest`."""
        self._raw = self._pending = ""
        self._in_list = False
        self._step = self._text
        for character in rest:
            self._step(character)

    def _give_up(self, character: str) -> None:
        """No call comes of what is kept: it is content, whatever its texts spell."""
        self._content(self._raw)
        self._leave(character)

    def _begin(self, name: str) -> None:
        self._tell(CallBegins(self.num_calls, name))
        self.num_calls += 1


class _Scan:
    """Where an object of JSON ends."""

    def __init__(self) -> None:
        self.depth = 0
        self._in_string = self._escaped = False

    def step(self, character: str) -> bool | None:
        """Whether the object ends with `character`; None where it can't be JSON."""
        if self._in_string:
            if character < " ":
                return None
            if self._escaped:
                self._escaped = False
            elif character == "\\":
                self._escaped = True
            elif character == '"':
                self._in_string = False
            return False
        if character == '"':
            self._in_string = True
        elif character not in _BARE:
            return None
        elif character in "{[":
            self.depth += 1
        elif character in "}]":
            self.depth -= 1
        return self.depth == 0


def read_call(text: str, names: Collection[str]) -> tuple[str, str] | None:
    """Name and arguments, as JSON of an object, of a call's text; None where it is none.

    Arguments may be missing, go by either of two names, and be an object inside a string: models
    write all of these.
    """
    try:
        members = _members(text)
        name = json.loads(members["name"])
        arguments = members.get("arguments", members.get("parameters", "{}"))
        value = _loads(arguments)
        if isinstance(value, str):
            arguments, value = value, _loads(value)
    except (KeyError, ValueError, RecursionError):
        return None
    is_call = isinstance(name, str) and name in names and isinstance(value, dict)
    return (name, arguments) if is_call else None


def _members(text: str) -> dict[str, str]:
    """The texts of an object's values by their keys. Raises ValueError, RecursionError."""
    if not isinstance(_loads(text), dict):
        raise ValueError("no object")
    decoder = json.JSONDecoder()
    members: dict[str, str] = {}
    at = _past_blanks(text, text.index("{") + 1)
    while text[at] != "}":
        key, at = decoder.raw_decode(text, at)
        at = _past_blanks(text, _past_blanks(text, at) + 1)
        _, end = decoder.raw_decode(text, at)
        members[key] = text[at:end]
        at = _past_blanks(text, end)
        if text[at] == ",":
            at = _past_blanks(text, at + 1)
    return members


def _past_blanks(text: str, at: int) -> int:
    while text[at] in _BLANKS:
        at += 1
    return at


def _loads(text: str) -> Any:
    return json.loads(text, parse_constant=_refuse)


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is no JSON")
