"""Structured output as a request asks for it: one constraint on the text of the answer, checked.

Knows the five kinds of constraint and their bounds; knows no grammar's meaning: whether a schema or
a regular expression can be followed is found when `foredraft.grammar` compiles it for a model.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from foredraft.core.errors import InvalidRequest

KINDS = ("json", "regex", "choice", "grammar", "json_object")
LONGEST_TEXT = 262_144  # characters of a schema, an expression, a grammar, or all choices together
DEEPEST_SCHEMA = 100  # objects and lists within each other
MOST_CHOICES = 10_000
LONGEST_REGEX = 16_384  # characters


@dataclass(frozen=True, slots=True)
class StructuredOutputs:
    """What the answer must be; exactly one of the first five. The names are vLLM's.

    Raises:
        InvalidRequest: none or several are given, or one is of the wrong type or too large; the
            message names the field.
    """

    json: str | bool | Mapping[str, Any] | None = None  # a JSON schema; kept as its text
    regex: str | None = None  # of the whole answer
    choice: Sequence[str] | None = None  # one of these, word for word
    grammar: str | None = None  # in Lark's notation, as llguidance reads it; it begins at `start`
    json_object: bool | None = None  # any JSON object
    disable_any_whitespace: bool = False  # JSON without spaces and line ends between its tokens

    def __post_init__(self) -> None:
        if self.json_object is not None and not isinstance(self.json_object, bool):
            raise InvalidRequest(
                f"structured_outputs.json_object must be true, got {_short(self.json_object)}"
            )
        given = [kind for kind in KINDS if getattr(self, kind) not in (None, False)]
        if self.json is False:
            given.insert(0, "json")  # the schema that nothing fits
        if len(given) != 1:
            raise InvalidRequest(
                f"structured_outputs must have exactly one of {', '.join(KINDS)}, "
                f"got {' and '.join(given) or 'none'}"
            )
        if not isinstance(self.disable_any_whitespace, bool):
            raise InvalidRequest(
                "structured_outputs.disable_any_whitespace must be true or false, "
                f"got {_short(self.disable_any_whitespace)}"
            )
        if self.disable_any_whitespace and self.kind not in ("json", "json_object"):
            raise InvalidRequest(
                "structured_outputs.disable_any_whitespace needs json or json_object, "
                f"got {self.kind}"
            )
        if self.kind == "json":
            object.__setattr__(self, "json", _schema_text(self.json))
        elif self.kind == "choice":
            object.__setattr__(self, "choice", _choices(self.choice))
        elif self.kind != "json_object":
            _check_text(self.kind, getattr(self, self.kind))

    @property
    def kind(self) -> str:
        """Which of the five is given."""
        if self.json is not None:
            return "json"
        return next(kind for kind in KINDS[1:] if getattr(self, kind) not in (None, False))


def _schema_text(schema: object) -> str:
    """The schema as text in one form, so that equal ones are known as equal."""
    if isinstance(schema, str):
        _check_length("json", schema, LONGEST_TEXT)
        try:
            schema = json.loads(schema, parse_constant=_refuse_constant)
        except json.JSONDecodeError as error:
            raise InvalidRequest(
                f"structured_outputs.json is no JSON: {error.msg} at line {error.lineno}, "
                f"column {error.colno}"
            ) from error
        except (RecursionError, ValueError) as error:
            raise InvalidRequest(f"structured_outputs.json can't be read: {error}") from error
    if not isinstance(schema, Mapping | bool):
        raise InvalidRequest(
            "structured_outputs.json must be a JSON schema (an object, true or false), "
            f"got {_short(schema)}"
        )
    _check_depth(schema)
    try:
        text = json.dumps(schema, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidRequest(f"structured_outputs.json is no JSON value: {error}") from error
    _check_text("json", text)
    return text


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is no JSON number")


def _check_depth(schema: object) -> None:
    level: list[object] = [schema]
    for _ in range(DEEPEST_SCHEMA):
        below: list[object] = []
        for value in level:
            if isinstance(value, Mapping):
                below += value.values()
            elif isinstance(value, list | tuple):
                below += value
        level = below
        if not level:
            return
        if len(level) > LONGEST_TEXT:
            raise InvalidRequest(
                f"structured_outputs.json holds more than {LONGEST_TEXT} values at one depth"
            )
    raise InvalidRequest(
        f"structured_outputs.json is nested deeper than {DEEPEST_SCHEMA} objects and lists"
    )


def _choices(choices: object) -> tuple[str, ...]:
    if not isinstance(choices, Sequence) or isinstance(choices, str | bytes) or not choices:
        raise InvalidRequest(
            f"structured_outputs.choice must be a list of one or more texts, got {_short(choices)}"
        )
    if len(choices) > MOST_CHOICES:
        raise InvalidRequest(
            f"structured_outputs.choice holds {len(choices)} texts, {MOST_CHOICES} at most are read"
        )
    total = 0
    for choice in choices:
        _check_text("choice", choice)
        total += len(choice)
    if total > LONGEST_TEXT:
        raise InvalidRequest(
            f"structured_outputs.choice has {total} characters, {LONGEST_TEXT} at most are read"
        )
    return tuple(dict.fromkeys(choices))


def _check_text(kind: str, text: object) -> None:
    if not isinstance(text, str):
        raise InvalidRequest(f"structured_outputs.{kind} must be text, got {_short(text)}")
    if not text:
        raise InvalidRequest(f"structured_outputs.{kind} must hold text, it is empty")
    _check_length(kind, text, LONGEST_REGEX if kind == "regex" else LONGEST_TEXT)
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest(
            f"structured_outputs.{kind} is no text: character {error.start} is half of a pair"
        ) from error
    if kind != "json" and "\0" in text:
        raise InvalidRequest(f"structured_outputs.{kind} holds a zero character")


def _check_length(kind: str, text: str, most: int) -> None:
    if len(text) > most:
        raise InvalidRequest(
            f"structured_outputs.{kind} has {len(text)} characters, {most} at most are read"
        )


def _short(value: object) -> str:
    text = " ".join(repr(value).split())
    return text if len(text) <= 80 else f"{text[:77]}..."
