"""What tests of foredraft need, public: scripted drafters, tiny random models, exact laws of rules.

`drafters`: drafters that follow a script. `requests`: what a drafter is asked. `models`: tiny
random targets. `law`, over `branches`, `draft_sources` and `tables`: what an acceptance rule emits,
exactly; `mutants`, `tree_mutants` and `block_mutants`: wrong rules that must be caught; `rules`:
the table of rules.
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
    SkewedTreeDrafter,
    TreeDrafter,
    WrongAtDrafter,
)
from foredraft.testing.models import target_logits, tiny_model, write_tiny_checkpoint
from foredraft.testing.pairs import TinyPair, tiny_noisy_pair, tiny_pair
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
    "SkewedTreeDrafter",
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
