"""What tests of foredraft need, public: scripted drafters, tiny random models, exact laws of rules.

`drafters`: drafters that follow a script. `models`: tiny random targets. `law`, `tables` and
`mutants`: what an acceptance rule emits, exactly, and wrong rules that must be caught.
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
    "TreeDrafter",
    "WrongAtDrafter",
    "target_logits",
    "tiny_model",
    "write_tiny_checkpoint",
]
