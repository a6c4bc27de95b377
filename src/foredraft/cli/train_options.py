"""The options that every `foredraft train` of a student shares, as frozen values.

Knows option names; imports neither torch nor the training room until an option is used.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Option

from foredraft.cli.options import JsonFlag
from foredraft.core.errors import ConfigError

if TYPE_CHECKING:
    import torch

    from foredraft.training.loop import Settings
    from foredraft.training.student import Objective

PANEL = "Training"

DataOption = Annotated[
    Path, Option(help="Answers of `foredraft train data`.", metavar="DIR", show_default=False)
]
OutOption = Annotated[
    Path,
    Option(
        help="Of the run: log, checkpoint, and in best/ what an engine loads. The same command "
        "goes on after a stop.",
        metavar="DIR",
        show_default=False,
    ),
]


class LossChoice(StrEnum):
    KL = "kl"
    CROSS_ENTROPY = "cross_entropy"
    TV = "tv"
    HYBRID = "hybrid"


class PrecisionChoice(StrEnum):
    AUTO = "auto"
    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"


class WeightingChoice(StrEnum):
    DECAY = "decay"
    SURVIVAL = "survival"


def precision_on(choice: PrecisionChoice, device: torch.device) -> str:
    """What was chosen, or what is best there."""
    from foredraft.training.loop import best_precision

    return best_precision(device) if choice is PrecisionChoice.AUTO else choice.value


def _option(words: str, *names: str, value: str = "N", **more: Any) -> Any:
    return Option(*names, help=words, metavar=value, rich_help_panel=PANEL, **more)


@dataclass(frozen=True)
class ResultOptions:
    """What a run shows."""

    plot: Annotated[
        Path | None, Option(help="Draw loss and acceptance into a PNG at the end.", metavar="FILE")
    ] = None
    json_output: JsonFlag = False


@dataclass(frozen=True)
class TrainingOptions:
    """What a student drafts, and the fields of `Settings` and `Objective`."""

    draft_vocab_size: Annotated[
        int | None,
        _option("Tokens that can be drafted: those said most. (default: all)", min=2),
    ] = None
    epochs: Annotated[float, _option("How often every answer is learned from.", value="X")] = 3.0
    steps: Annotated[int | None, _option("Instead of epochs.", min=1)] = None
    batch_tokens: Annotated[int, _option("Tokens of a step, padding counted.", min=2)] = 2048
    max_length: Annotated[int, _option("Tokens of a sequence that are read.", min=3)] = 1024
    learning_rate: Annotated[
        float | None, _option("The highest. (default: the student's own)", value="X")
    ] = None
    warmup: Annotated[float, _option("Share of the steps in which it rises.", value="X")] = 0.04
    weight_decay: Annotated[float, _option("Of matrices.", value="X")] = 0.01
    clip: Annotated[float, _option("Norm of the gradient at most.", value="X")] = 1.0
    loss: Annotated[
        LossChoice, _option("kl, cross_entropy, tv, or hybrid: kl first, tv late.", value="NAME")
    ] = LossChoice.KL
    weighting: Annotated[
        WeightingChoice,
        _option(
            "Of later drafts: decay, or survival: times the chance to get there.", value="NAME"
        ),
    ] = WeightingChoice.DECAY
    decay: Annotated[float, _option("What each draft weighs beside the one before.", value="X")] = (
        0.8
    )
    precision: Annotated[
        PrecisionChoice,
        _option(
            "Of the student's products: float32, bfloat16, or auto: bfloat16 where it is fast.",
            value="NAME",
        ),
    ] = PrecisionChoice.AUTO
    held_out: Annotated[
        float, _option("Share of the prompts that acceptance is measured on.", value="X")
    ] = 0.05
    evaluation_answers: Annotated[int, _option("Of those, at most.", min=1)] = 64
    evaluate_every: Annotated[
        int | None, _option("Steps between measurements. (default: 20 in the run)", min=1)
    ] = None
    checkpoint_every: Annotated[int, _option("Steps that a stop may lose.", min=1)] = 100
    patience: Annotated[
        int, _option("Measurements without a better one that end the run; 0: never.", min=0)
    ] = 6
    seed: Annotated[int, _option("Of the order of answers, and of what begins at random.")] = 0

    def settings(self, learning_rate: float) -> Settings:
        """`learning_rate` is the student's own, where none is given; see also `precision_on`.
        Raises ConfigError.
        """
        from foredraft.training.loop import Settings

        self._check()
        names = {each.name for each in fields(self)} & {each.name for each in fields(Settings)}
        values = {name: getattr(self, name) for name in names}
        if self.learning_rate is None:
            values["learning_rate"] = learning_rate
        values["precision"] = self.precision.value
        return Settings(**values)

    def objective(self) -> Objective:
        from foredraft.training.student import Objective

        return Objective(self.loss.value, self.weighting.value, self.decay)

    def _check(self) -> None:
        for name in ("epochs", "clip", "decay"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"--{name} must be above 0, got {getattr(self, name):g}")
        if self.learning_rate is not None and not 0 < self.learning_rate < 1:
            raise ConfigError(
                f"--learning-rate must be between 0 and 1, got {self.learning_rate:g}"
            )
        if not 0 <= self.warmup < 1:
            raise ConfigError(f"--warmup must be from 0 up to, not at, 1, got {self.warmup:g}")
        if not self.weight_decay >= 0:
            raise ConfigError(f"--weight-decay must be 0 or more, got {self.weight_decay:g}")
        if self.seed < 0:
            raise ConfigError(f"--seed must be 0 or more, got {self.seed}")
