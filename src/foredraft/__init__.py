"""foredraft: exact speculative decoding.

The public names, imported on first use so that `import foredraft` (and the command's help) stays
light.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from foredraft.core.errors import (
        ConfigError,
        EngineClosed,
        InvalidRequest,
        ModelError,
        QueueFull,
        UserError,
    )
    from foredraft.core.sampling import SamplingParams
    from foredraft.core.structured_outputs import StructuredOutputs
    from foredraft.drafters.interface import (
        Capabilities,
        Draft,
        Drafter,
        DraftRequest,
        StepResult,
    )
    from foredraft.engine.async_engine import AsyncEngine
    from foredraft.engine.llm import LLM
    from foredraft.engine.outputs import CompletionOutput, RequestOutput, StreamDelta
    from foredraft.engine.submission import RequestOptions

__version__ = "0.1.0"

_HOMES = {
    "LLM": "engine.llm",
    "AsyncEngine": "engine.async_engine",
    "RequestOptions": "engine.submission",
    "SamplingParams": "core.sampling",
    "StructuredOutputs": "core.structured_outputs",
    "RequestOutput": "engine.outputs",
    "CompletionOutput": "engine.outputs",
    "StreamDelta": "engine.outputs",
    "Drafter": "drafters.interface",
    "Draft": "drafters.interface",
    "DraftRequest": "drafters.interface",
    "StepResult": "drafters.interface",
    "Capabilities": "drafters.interface",
    "UserError": "core.errors",
    "InvalidRequest": "core.errors",
    "ModelError": "core.errors",
    "ConfigError": "core.errors",
    "QueueFull": "core.errors",
    "EngineClosed": "core.errors",
}

__all__ = [
    "LLM",
    "AsyncEngine",
    "Capabilities",
    "CompletionOutput",
    "ConfigError",
    "Draft",
    "DraftRequest",
    "Drafter",
    "EngineClosed",
    "InvalidRequest",
    "ModelError",
    "QueueFull",
    "RequestOptions",
    "RequestOutput",
    "SamplingParams",
    "StepResult",
    "StreamDelta",
    "StructuredOutputs",
    "UserError",
]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'foredraft' has no attribute {name!r}")
    return getattr(import_module(f"foredraft.{home}"), name)


def __dir__() -> list[str]:
    return sorted((*globals(), *_HOMES))
