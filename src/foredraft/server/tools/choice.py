"""Which functions an answer may call, and whether it has to.

Knows a request's fields and a format; knows no message, no grammar and no engine.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from foredraft.server.errors import APIError
from foredraft.server.schemas import ChatRequest, FunctionDefinition, NamedTool
from foredraft.server.tools.formats import ToolFormat
from foredraft.server.tools.parameters import check_parameters

NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}


@dataclass(frozen=True, slots=True)
class Function:
    """A function that may be called.

    Attributes:
        place: of its definition among the request's tools.
        is_strict: its arguments are held to its schema wherever it is called.
    """

    name: str
    description: str | None
    parameters: Mapping[str, Any]
    is_strict: bool
    place: int

    def told(self) -> dict[str, Any]:
        """As chat templates know it."""
        described = {} if self.description is None else {"description": self.description}
        function = {"name": self.name, **described, "parameters": dict(self.parameters)}
        return {"type": "function", "function": function}


@dataclass(frozen=True, slots=True)
class ToolUse:
    """What a request says of tools, for a model that writes calls in `form`.

    Attributes:
        functions: all that the model is told of.
        callable: those that it may call.
        must_call: the answer is one or several calls.
        may_repeat: it may be several.
    """

    form: ToolFormat
    functions: Sequence[Function]
    callable: Sequence[Function]
    must_call: bool
    may_repeat: bool

    @property
    def is_held(self) -> bool:
        """Whether a grammar holds calls to their form."""
        limited = not self.may_repeat or any(each.is_strict for each in self.callable)
        return self.must_call or limited


def tool_use(request: ChatRequest, form: ToolFormat) -> ToolUse | None:
    """None where nothing is to be called. Raises APIError that names the field."""
    choice, tools = request.tool_choice, request.tools
    if tools is None:
        if choice not in (None, "none"):
            raise APIError(400, "tool_choice needs tools", param="tool_choice")
        if request.parallel_tool_calls is not None:
            raise APIError(400, "parallel_tool_calls needs tools", param="parallel_tool_calls")
        return None
    functions = _functions([tool.function for tool in tools])
    if choice == "none":
        return None
    named = _named(choice, functions) if isinstance(choice, NamedTool) else functions
    return ToolUse(
        form,
        functions,
        named,
        must_call=named is not functions or choice == "required",
        may_repeat=request.parallel_tool_calls is not False and named is functions,
    )


def _functions(definitions: Sequence[FunctionDefinition]) -> list[Function]:
    places: dict[str, int] = {}
    functions = []
    for place, each in enumerate(definitions):
        field = f"tools.{place}.function"
        if each.name in places:
            raise APIError(
                400,
                f"{field}.name: tools.{places[each.name]} has the name {each.name!a} already",
                param=f"{field}.name",
            )
        places[each.name] = place
        parameters = NO_PARAMETERS if each.parameters is None else each.parameters
        check_parameters(parameters, f"{field}.parameters")
        functions.append(
            Function(each.name, each.description, parameters, each.strict is True, place)
        )
    return functions


def _named(choice: NamedTool, functions: Sequence[Function]) -> list[Function]:
    name = choice.function.name
    found = [each for each in functions if each.name == name]
    if not found:
        known = ", ".join(each.name for each in functions[:8])
        more = ", ..." if len(functions) > 8 else ""
        raise APIError(
            400,
            f"tool_choice: no tool has the name {name!a}; there are {known}{more}",
            param="tool_choice",
        )
    return found
