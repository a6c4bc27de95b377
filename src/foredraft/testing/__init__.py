"""What tests of foredraft need, public: scripted drafters, tiny random models, exact laws of rules.

`drafters`: drafters that follow a script. `requests`: what a drafter is asked. `models`: tiny
random targets. `law`, `tables` and `mutants`: what an acceptance rule emits, exactly, and wrong
rules that must be caught.
"""

from foredraft.testing.drafters import (
    EmptyDrafter,
    FixedDrafter,
    LiarDrafter,
    OracleDrafter,
    RaisingDrafter,
    RecordingDrafter,
    RepeatDrafter,
    RoutingDrafter,
    SelfDrafter,
    SkewedDrafter,
    TreeDrafter,
    WrongAtDrafter,
)
from foredraft.testing.models import target_logits, tiny_model, write_tiny_checkpoint
from foredraft.testing.requests import draft_request

__all__ = [
    "EmptyDrafter",
    "FixedDrafter",
    "LiarDrafter",
    "OracleDrafter",
    "RaisingDrafter",
    "RecordingDrafter",
    "RepeatDrafter",
    "RoutingDrafter",
    "SelfDrafter",
    "SkewedDrafter",
    "TinyPair",
    "TreeDrafter",
    "WrongAtDrafter",
    "draft_request",
    "target_logits",
    "tiny_model",
    "tiny_noisy_pair",
    "tiny_pair",
    "write_tiny_checkpoint",
]
