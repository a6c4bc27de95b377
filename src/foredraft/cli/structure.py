"""The group of command-line options that say what structure an answer must have.

Knows option names and the files they name; imports nothing else until an option is used.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Option

from foredraft.cli.prompt import check_text, read_text
from foredraft.core.errors import ConfigError

if TYPE_CHECKING:
    from foredraft.core.structured_outputs import StructuredOutputs

PANEL = "Structure of the answer"


def _structure(words: str, *names: str, value: str | None) -> Any:
    return Option(*names, help=words, metavar=value, rich_help_panel=PANEL)


@dataclass(frozen=True)
class StructureOptions:
    """The kinds of `StructuredOutputs`; one of them at most."""

    json_schema: Annotated[
        Path | None, _structure("JSON that fits the schema in this file.", value="FILE")
    ] = None
    json_object: Annotated[bool, _structure("Any JSON object.", "--json-object", value=None)] = (
        False
    )
    regex: Annotated[
        str | None, _structure("Text that matches this expression as a whole.", value="REGEX")
    ] = None
    grammar: Annotated[
        Path | None, _structure("Text of the Lark grammar in this file.", value="FILE")
    ] = None
    choice: Annotated[
        list[str] | None, _structure("This text; may be repeated for more.", value="TEXT")
    ] = None

    def structured_outputs(self) -> StructuredOutputs | None:
        """None where nothing is asked for.

        Raises ConfigError for more than one kind, InvalidRequest for one that is malformed,
        UserError for a file that can't be read.
        """
        from foredraft.core.structured_outputs import StructuredOutputs

        options = {
            "--json-schema": self.json_schema,
            "--json-object": self.json_object or None,
            "--regex": self.regex,
            "--grammar": self.grammar,
            "--choice": self.choice or None,
        }
        given = [name for name, value in options.items() if value is not None]
        if not given:
            return None
        if len(given) > 1:
            raise ConfigError(f"{' and '.join(given)}: an answer has one structure, give one")
        if self.json_schema is not None:
            return StructuredOutputs(json=read_text(self.json_schema, "--json-schema"))
        if self.grammar is not None:
            return StructuredOutputs(grammar=read_text(self.grammar, "--grammar"))
        if self.regex is not None:
            return StructuredOutputs(regex=check_text(self.regex, "--regex"))
        if self.choice:
            return StructuredOutputs(choice=[check_text(each, "--choice") for each in self.choice])
        return StructuredOutputs(json_object=True)
