"""All drafters for tests, by one name: scripted ones, sampled ones, and wrappers around others."""

from foredraft.testing.sampled_drafters import SelfDrafter, SkewedDrafter
from foredraft.testing.sampled_trees import SkewedTreeDrafter
from foredraft.testing.scripted_drafters import (
    EmptyDrafter,
    FixedDrafter,
    LiarDrafter,
    OracleDrafter,
    RepeatDrafter,
    ScriptedDrafter,
    WrongAtDrafter,
    different_token,
)
from foredraft.testing.wrapping_drafters import (
    RaisingDrafter,
    RecordingDrafter,
    RoutingDrafter,
    TreeDrafter,
    WrappingDrafter,
    merge_chains,
)

__all__ = [
    "EmptyDrafter",
    "FixedDrafter",
    "LiarDrafter",
    "OracleDrafter",
    "RaisingDrafter",
    "RecordingDrafter",
    "RepeatDrafter",
    "RoutingDrafter",
    "ScriptedDrafter",
    "SelfDrafter",
    "SkewedDrafter",
    "SkewedTreeDrafter",
    "TreeDrafter",
    "WrappingDrafter",
    "WrongAtDrafter",
    "different_token",
    "merge_chains",
]
