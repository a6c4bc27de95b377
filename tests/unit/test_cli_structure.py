"""The command's options for the structure of an answer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from foredraft.cli.structure import StructureOptions
from foredraft.core.errors import UserError
from foredraft.core.structured_outputs import StructuredOutputs


def test_each_option_is_one_kind(tmp_path: Path) -> None:
    schema, grammar = tmp_path / "schema.json", tmp_path / "answer.lark"
    schema.write_text('{"type": "null"}')
    grammar.write_text('start: "ä"')
    made = {
        StructureOptions(): None,
        StructureOptions(json_schema=schema): StructuredOutputs(json={"type": "null"}),
        StructureOptions(json_object=True): StructuredOutputs(json_object=True),
        StructureOptions(regex="a+"): StructuredOutputs(regex="a+"),
        StructureOptions(grammar=grammar): StructuredOutputs(grammar='start: "ä"'),
    }
    for options, wanted in made.items():
        assert options.structured_outputs() == wanted
    options = StructureOptions(choice=["yes", "no"])
    assert options.structured_outputs() == StructuredOutputs(choice=["yes", "no"])
    assert StructureOptions(choice=[]).structured_outputs() is None


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"regex": "a", "choice": ["b"]}, "--regex and --choice: an answer has one structure"),
        ({"json_schema": Path("missing.json")}, "cannot read --json-schema 'missing.json'"),
        ({"regex": ""}, "structured_outputs.regex must hold text"),
    ],
)
def test_mistakes_are_named(given: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        StructureOptions(**given).structured_outputs()
