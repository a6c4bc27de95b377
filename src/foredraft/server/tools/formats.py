"""How models write tool calls, and which way a model's chat template teaches.

Knows formats and templates' text; knows no request and no tokenizer.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass

_TOOLS = re.compile(r"\btools\b")


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """One way to write calls. A call is `{"name": ..., arguments_key: {...}}`.

    Attributes:
        opening: what stands before a call or a list of them; "": the whole answer is a call.
        closing: what stands behind it, or "".
        is_list: calls come as one list; else each has an opening and a closing of its own.
        gap: what the model puts between opening, call and closing.
        others: other texts that models of this kind open with.
        by_template: the chat template writes tools, calls and their results; else we do.
    """

    name: str
    opening: str
    closing: str
    is_list: bool = False
    gap: str = ""
    arguments_key: str = "arguments"
    others: tuple[str, ...] = ()
    by_template: bool = True

    @property
    def openings(self) -> tuple[str, ...]:
        return (self.opening, *self.others) if self.opening else self.others

    def header(self, name: str) -> str:
        """What a call of `name` begins with, up to its arguments."""
        return f'{{"name": {json.dumps(name)}, {json.dumps(self.arguments_key)}: '


# NousResearch's Hermes 2 Pro and 3, Qwen 2.5 and 3, and many others.
HERMES = ToolFormat("hermes", "<tool_call>", "</tool_call>", gap="\n")
# For templates that know of no tools: Hermes' form, in words of ours (`prompt`).
GENERIC = ToolFormat("generic", "<tool_call>", "</tool_call>", gap="\n", by_template=False)
# Mistral's from 7B v0.3 to Nemo and Small 3.1.
MISTRAL = ToolFormat("mistral", "[TOOL_CALLS]", "", is_list=True)
# Llama 3.1 to 3.3: the answer is the call.
LLAMA = ToolFormat("llama", "", "", arguments_key="parameters", others=("<|python_tag|>",))
# Phi-4-mini: its template takes tools as the system message's; vLLM's asks for "functools".
PHI = ToolFormat(
    "phi", "<|tool_call|>", "<|/tool_call|>", is_list=True, others=("functools",),
    by_template=False,
)  # fmt: skip


def format_of(template: str | None) -> ToolFormat:
    """The format that a chat template teaches; GENERIC for one that knows of no tools, or of calls
    that are no JSON.
    """
    source = template or ""
    if not _TOOLS.search(source):
        return GENERIC
    if "[TOOL_CALLS]" in source and "[ARGS]" not in source:
        return MISTRAL
    if "<tool_call>" in source and "<function=" not in source:
        return HERMES
    if "ipython" in source and '"parameters"' in source:
        return LLAMA
    if "<|tool|>" in source and "message['tools']" in source:
        return PHI
    return GENERIC
