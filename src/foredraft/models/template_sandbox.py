"""jinja2 as transformers sets it up, with every loop, call and value of a template counted.

Knows jinja2's nodes, operators, methods and filters, and which of them could outgrow their inputs;
knows no message and no token. jinja2's own sandbox keeps a template from reaching out; it does not
keep it from filling the memory or running for ever.
"""

from __future__ import annotations

import datetime
import functools
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jinja2
from jinja2 import nodes, pass_context
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context, markup_join
from jinja2.sandbox import ImmutableSandboxedEnvironment, SandboxedFormatter
from jinja2.visitor import NodeTransformer

from foredraft.models.template_budget import (
    STEP,
    TemplateLimit,
    budget,
    check_size,
    made,
    passed,
    read,
    spend,
    weigh,
)
from foredraft.models.template_checks import (
    BUILT_IN,
    FILTER_CHECKS,
    LONG_NUMBER,
    MAX_WIDTH,
    check_operation,
    checked_arguments,
)

# Filters without a place in a conversation, each with a way to run away or to give another text
# each time; a template that names one does not compile.
_LEFT_OUT_FILTERS = (
    "filesizeformat", "pprint", "random", "striptags", "urlize", "wordwrap", "xmlattr",
)  # fmt: skip
_LEFT_OUT_GLOBALS = ("cycler", "lipsum")
# Filters that pass values on without looking into them.
_PASSING_FILTERS = (
    "attr", "batch", "count", "d", "default", "first", "items", "last", "length", "list",
    "map", "reject", "rejectattr", "reverse", "safe", "select", "selectattr", "slice",
)  # fmt: skip
_COMPARING_TESTS = (
    "==", "eq", "equalto", "!=", "ne", "in", "<", "lt", "lessthan", "<=", "le", ">", "gt",
    "greaterthan", ">=", "ge",
)  # fmt: skip
# Names that no template can write.
_STEP, _NEW, _READ, _PASSED, _CONCAT = "(step)", "(new)", "(read)", "(passed)", "(concat)"


class Refusal(jinja2.TemplateError):
    """The template called `raise_exception`."""


class TemplateEnvironment(ImmutableSandboxedEnvironment):
    """Compiles templates that count what they do; render them with `render`."""

    intercepted_binops = frozenset(["+", "*", "**", "%"])

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_GenerationBlocks, loopcontrols],
            finalize=_finalize,
            optimized=False,  # nothing is computed while compiling, outside the budget
        )
        for name in _LEFT_OUT_GLOBALS:
            del self.globals[name]
        for name in _LEFT_OUT_FILTERS:
            del self.filters[name]
        self.filters["tojson"] = _to_json
        for name, function in list(self.filters.items()):
            self.filters[name] = _guarded_filter(name, function)
        for name in _COMPARING_TESTS:
            test: Any = self.tests[name]
            self.tests[name] = _guarded_test(test)
        self.filters |= {
            _STEP: _step, _NEW: made, _READ: read, _PASSED: passed, _CONCAT: _concat,
        }  # fmt: skip
        self.globals |= {"raise_exception": _raise_exception, "strftime_now": _strftime_now}

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree: nodes.Template = _Counting().visit(super()._parse(source, name, filename))
        tree.set_environment(self)
        return tree

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        spend(STEP)
        check_operation(operator, left, right)
        return made(super().call_binop(context, operator, left, right))

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805
        spend(STEP)
        for value in (*args, *kwargs.values()):
            passed(value)
        owner = getattr(__obj, "__self__", None)
        if isinstance(owner, BUILT_IN):
            args = checked_arguments(owner, __obj.__name__, args)
        return made(super().call(__context, __obj, *args, **kwargs))

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        if super().wrap_str_format(value) is None:
            return None
        text, by_mapping = str(value.__self__), value.__name__ == "format_map"
        formatter = _Formatter(self)

        def wrapper(*args: Any, **kwargs: Any) -> str:
            if by_mapping:
                (kwargs,) = args
                args = ()
            return formatter.vformat(text, args, kwargs)

        return wrapper


def render(template: jinja2.Template, variables: Mapping[str, Any]) -> str:
    """The text of a template of a `TemplateEnvironment`.

    Raises TemplateLimit for one that outgrows its budget, `Refusal` where it refuses, and whatever
    else goes wrong inside it.
    """
    with budget():
        pieces, size = [], 0
        for piece in template.generate(variables):
            size += len(piece)
            check_size(size)
            pieces.append(piece)
        return "".join(pieces)


class _Counting(NodeTransformer):
    """Puts a count into every loop and macro, and around values that are built, cut or compared."""

    def visit_For(self, node: nodes.For) -> nodes.Node:  # noqa: N802 - jinja2's names
        step = _filtered(nodes.Const(_text_size(node)), _STEP)
        self._visit_body(node)
        if node.test is not None:
            node.test = nodes.And(step, node.test)
        return node

    def _visit_body(self, node: Any) -> Any:
        step = _filtered(nodes.Const(_text_size(node)), _STEP)
        self.generic_visit(node)
        node.body.insert(0, nodes.ExprStmt(step, lineno=node.lineno))
        return node

    visit_Macro = visit_CallBlock = visit_Block = _visit_body  # noqa: N815

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        node.expr = _filtered(node.expr, _READ)
        for operand in node.ops:
            operand.expr = _filtered(operand.expr, _READ)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        return _filtered(nodes.List(node.nodes), _CONCAT)

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        return _filtered(node, _PASSED) if isinstance(node.arg, nodes.Slice) else node

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Node:  # noqa: N802
        return self._visit_literal(node) if node.ctx == "load" else node

    def _visit_literal(self, node: Any) -> nodes.Node:
        self.generic_visit(node)
        return _filtered(node, _NEW)

    visit_List = visit_Dict = _visit_literal  # noqa: N815


class _GenerationBlocks(Extension):
    """`{% generation %} ... {% endgeneration %}`: marks for training, no effect on the text."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 reads this attribute of the class

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Formatter(SandboxedFormatter):
    """`str.format` with narrow fields."""

    def format_field(self, value: Any, format_spec: str) -> Any:
        if LONG_NUMBER.search(format_spec):
            raise TemplateLimit(f"it formats a field wider than {MAX_WIDTH}")
        read(value)
        return made(super().format_field(value, format_spec))

    def convert_field(self, value: Any, conversion: Any) -> Any:
        return made(super().convert_field(read(value), conversion))


def _filtered(node: nodes.Expr, name: str) -> nodes.Filter:
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)


def _text_size(node: nodes.Node) -> int:
    """Characters that the template itself writes in a body."""
    return sum(len(data.data) for data in node.find_all(nodes.TemplateData))


def _step(size: int) -> bool:
    spend(STEP + size)
    return True


def _concat(values: list[Any]) -> Any:
    check_size(sum(weigh(value) for value in values))
    return made(markup_join(values))


@pass_context  # for jinja2 not to call it while compiling
def _finalize(context: Context, value: Any) -> Any:
    return made(value)


def _guarded_filter(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    look, give = (passed, passed) if name in _PASSING_FILTERS else (read, made)

    @functools.wraps(function)
    def guarded(*args: Any, **kwargs: Any) -> Any:
        spend(STEP)
        for value in (*args, *kwargs.values()):
            look(value)
        if name in FILTER_CHECKS:
            # Behind the context or environment that some filters are given first.
            own = args[1:] if hasattr(function, "jinja_pass_arg") else args
            FILTER_CHECKS[name](*own, **kwargs)
        return give(function(*args, **kwargs))

    return guarded


def _guarded_test(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def guarded(*args: Any) -> Any:
        for value in args:
            read(value)
        return function(*args)

    return guarded


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: Sequence[str] | None = None,
    sort_keys: bool = False,
) -> str:
    if weigh(indent) > MAX_WIDTH or (isinstance(indent, int) and indent > MAX_WIDTH):
        raise TemplateLimit(f"it indents JSON by more than {MAX_WIDTH}")
    encoder = json.JSONEncoder(
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=None if separators is None else (separators[0], separators[1]),
        sort_keys=sort_keys,
    )
    pieces, size = [], 0
    for piece in encoder.iterencode(value):
        size += len(piece)
        check_size(size)
        pieces.append(piece)
    return "".join(pieces)


def _raise_exception(message: str) -> None:
    raise Refusal(message)


def _strftime_now(layout: str) -> str:
    if len(layout) > MAX_WIDTH or LONG_NUMBER.search(layout):
        raise TemplateLimit("it asks for a date in a layout that is no layout")
    return datetime.datetime.now().strftime(layout)
