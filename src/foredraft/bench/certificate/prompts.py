"""The prompts that a certificate uses where the user gives none: short, of several kinds.

Knows text only. Two of them make the model copy, so that looking up n-grams has something to draft.
"""

from __future__ import annotations

from foredraft.bench.workload import Item

PROMPTS = (
    Item("story", "chat", ("Tell me a short story about a lighthouse keeper and a storm.",)),
    Item("code", "code", ("Write a Python function that returns the n-th Fibonacci number.",)),
    Item(
        "copy",
        "edit",
        (
            "Repeat word for word: The red boat left at dawn. The blue boat left at noon. The "
            "green boat left at night.",
        ),
    ),
    Item(
        "list",
        "extract",
        (
            "List all boats and houses: a red boat, a blue boat, a green boat, a red house, a blue "
            "house.",
        ),
    ),
)
