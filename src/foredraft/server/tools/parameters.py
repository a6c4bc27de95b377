"""Whether a function's parameters are a JSON schema of an object.

Knows the keywords that hold schemas; whether a grammar can honour a schema is not asked here, but
where one is made of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from foredraft.server.errors import APIError

TYPES = ("object", "array", "string", "number", "integer", "boolean", "null")
_ONE = (
    "items", "additionalProperties", "contains", "propertyNames", "not", "if", "then", "else",
    "unevaluatedItems", "unevaluatedProperties",
)  # fmt: skip
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")


def check_parameters(schema: Mapping[str, Any], field: str) -> None:
    """Raise APIError that names the place in `schema` which is no JSON schema."""
    kind = schema.get("type", "object")
    if kind != "object":
        raise _wrong(f"{field}.type", "'object'", kind)
    rest: list[tuple[str, Any]] = [(field, schema)]
    while rest:
        place, each = rest.pop()
        if isinstance(each, bool):
            continue
        if not isinstance(each, dict):
            raise _wrong(place, "a JSON schema (an object, true or false)", each)
        _check_words(each, place)
        rest += [(f"{place}.{key}", each[key]) for key in _ONE if _is_schema(each, key)]
        for key in _LISTS:
            parts = each.get(key, [])
            if not isinstance(parts, list):
                raise _wrong(f"{place}.{key}", "a list of schemas", parts)
            rest += [(f"{place}.{key}.{at}", part) for at, part in enumerate(parts)]
        for key in _MAPS:
            parts = each.get(key, {})
            if not isinstance(parts, dict):
                raise _wrong(f"{place}.{key}", "an object of schemas", parts)
            rest += [(f"{place}.{key}.{name}", part) for name, part in parts.items()]


def _is_schema(schema: Mapping[str, Any], key: str) -> bool:
    # `items` was a list before 2020, and that is still read.
    return key in schema and not (key == "items" and isinstance(schema[key], list))


def _check_words(schema: Mapping[str, Any], place: str) -> None:
    kinds = schema.get("type", [])
    for kind in kinds if isinstance(kinds, list) else [kinds]:
        if kind not in TYPES:
            raise _wrong(f"{place}.type", f"one of {', '.join(TYPES)}", kind)
    required = schema.get("required", [])
    if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
        raise _wrong(f"{place}.required", "a list of names", required)
    if not isinstance(schema.get("enum", []), list):
        raise _wrong(f"{place}.enum", "a list of values", schema["enum"])


def _wrong(place: str, expected: str, value: object) -> APIError:
    text = " ".join(ascii(value)[:200].split())
    short = text if len(text) <= 60 else f"{text[:57]}..."
    named = place if len(place) <= 200 else f"{place[:197]}..."
    return APIError(400, f"{named} must be {expected}, got {short}", param=named)
