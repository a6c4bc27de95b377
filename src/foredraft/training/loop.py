"""The training loop: AdamW, a schedule, measurements on held-out answers, checkpoints.

Knows a `Student`, answers and a run's directory; knows no head. A run that was stopped goes on from
its last checkpoint and ends with the same tensors as one that was not, to the bit on a CPU: nothing
is random but the order of answers, which is a function of the seed and the step's number.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from foredraft.core.counts import AcceptanceCounts
from foredraft.core.errors import UserError
from foredraft.training.acceptance import Measuring, measured
from foredraft.training.answers import Answers
from foredraft.training.batches import Order, make_batch
from foredraft.training.run_directory import RunDirectory
from foredraft.training.student import Student

PRECISIONS = ("float32", "bfloat16")
_BETAS = (0.9, 0.95)


@dataclass(frozen=True, slots=True)
class Settings:
    """How a student is trained."""

    epochs: float = 3.0  # how often every answer is learned from
    steps: int | None = None  # instead of epochs
    batch_tokens: int = 2048  # of a step, padding counted
    max_length: int = 1024  # tokens of a sequence; what is behind is left out
    learning_rate: float = 1e-3  # the highest
    warmup: float = 0.04  # share of the steps in which it rises
    final_rate: float = 0.05  # share of the highest at the end
    weight_decay: float = 0.01  # of matrices
    clip: float = 1.0  # norm of the gradient
    seed: int = 0
    precision: str = "float32"  # of the student's products; one of PRECISIONS
    log_every: int = 10  # steps
    evaluate_every: int | None = None  # steps; None: 20 times in the run
    checkpoint_every: int = 100  # steps; and at every evaluation
    evaluation_answers: int = 64  # held-out answers of an evaluation, at most
    patience: int = 6  # evaluations without a better one before the run ends; 0: never


@dataclass(slots=True)
class State:
    """How far a run is: what a checkpoint holds beside tensors."""

    step: int = 0  # steps done
    tokens: int = 0  # of answers, learned from so far
    seconds: float = 0.0
    best: float = 0.0  # mean acceptance length
    best_step: int = 0
    unimproved: int = 0  # evaluations since the best
    ended: bool = False


@dataclass(frozen=True, slots=True)
class Progress:
    """What the loop tells after every step."""

    step: int
    steps: int
    loss: float
    state: State
    acceptance: tuple[float, ...] = ()  # by position, on held-out answers, where just measured


class Loop:
    """One run."""

    def __init__(
        self,
        student: Student,
        answers: tuple[Answers, Answers],
        settings: Settings,
        directory: RunDirectory,
        measuring: Measuring,
    ) -> None:
        """`answers` are those to train on and those held out.

        Raises UserError for a checkpoint that can't be read or isn't this student's, and where
        nothing can be learned or measured.
        """
        self._student, self._settings, self._directory = student, settings, directory
        self._answers, held_out = answers
        self._measuring = measuring
        if not len(held_out):
            raise UserError("no answer is held out to measure acceptance on: more are needed")
        self._held_out = held_out[: settings.evaluation_answers]
        self._order = Order(
            self._answers, settings.batch_tokens, settings.max_length, settings.seed
        )
        per_epoch = self._order.steps_per_epoch
        self.steps = settings.steps or max(1, math.ceil(settings.epochs * per_epoch))
        self._evaluate_every = settings.evaluate_every or max(1, self.steps // 20)
        self._parameters = {
            name: each for name, each in student.module.named_parameters() if each.requires_grad
        }
        self._optimizer = _optimizer(self._parameters.values(), settings)
        self.state = State()
        found = directory.load()
        if found is not None:
            self._restore(*found)

    def run(self, report: Callable[[Progress], None] = lambda progress: None) -> State:
        """Train until the last step, or until acceptance has ceased to rise.

        Raises UserError for a loss that is no number; OSError where a file can't be written.
        """
        state, settings = self.state, self._settings
        self._directory.rewind_log(state.step)
        while state.step < self.steps and not state.ended:
            began = time.monotonic()
            record = self._step(state.step)
            state.step += 1
            state.seconds += time.monotonic() - began
            acceptance: tuple[float, ...] = ()
            if state.step % settings.log_every == 0:
                self._directory.log({**record, "seconds": round(state.seconds, 2)})
            if state.step % self._evaluate_every == 0 or state.step == self.steps:
                acceptance = self._evaluate()
            if acceptance or state.step % settings.checkpoint_every == 0:
                self._directory.save(asdict(state), self._tensors())
            report(Progress(state.step, self.steps, record["loss"], state, acceptance))
        return state

    def _step(self, step: int) -> dict[str, Any]:
        settings, device = self._settings, self._measuring.device
        indices = self._order.indices(step)
        batch = make_batch(self._answers, indices, settings.max_length, device)
        with self._precision():
            lesson = self._student.lesson(batch)
        self._optimizer.zero_grad(set_to_none=True)
        torch.autograd.backward(lesson.loss)
        norm = torch.nn.utils.clip_grad_norm_(self._parameters.values(), settings.clip)
        loss = float(lesson.loss.detach())
        if not (math.isfinite(loss) and math.isfinite(float(norm))):
            raise UserError(
                f"the loss of step {step + 1} is {loss}, its gradient's norm {float(norm)}: "
                f"try a learning rate below {settings.learning_rate:g}"
            )
        rate = learning_rate(settings, step, self.steps)
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        self._optimizer.step()
        self.state.tokens += batch.num_answer_tokens
        return {
            "step": step + 1,
            "tokens": self.state.tokens,
            "loss": round(loss, 6),
            "sampled_acceptance": [round(x, 4) for x in lesson.acceptance.tolist()],
            "gradient_norm": round(float(norm), 4),
            "learning_rate": rate,
        }

    def _evaluate(self) -> tuple[float, ...]:
        """Measure, keep the student if it is the best so far, and decide whether to go on."""
        began, state = time.monotonic(), self.state
        with self._precision():
            counts = measured(self._student, self._held_out, self._measuring)
        length = counts.mean_acceptance_length
        if length > state.best or not state.best_step:
            state.best, state.best_step, state.unimproved = length, state.step, 0
            self._student.save(self._directory.best)
        else:
            state.unimproved += 1
            state.ended = 0 < self._settings.patience <= state.unimproved
        state.seconds += time.monotonic() - began
        position = {"step": state.step, "tokens": state.tokens, "seconds": round(state.seconds, 2)}
        self._directory.log({**position, **acceptance_record(counts)})
        return tuple(counts.acceptance_by_position)

    def _precision(self) -> torch.autocast:
        kind, wanted = self._measuring.device.type, self._settings.precision == "bfloat16"
        return torch.autocast(kind, torch.bfloat16, enabled=wanted)

    def _tensors(self) -> dict[str, Tensor]:
        """Parameters and the optimiser's moments, by name."""
        found: dict[str, Tensor] = {}
        for name, parameter in self._parameters.items():
            found[f"parameter.{name}"] = parameter
            for key, value in self._optimizer.state[parameter].items():
                found[f"{key}.{name}"] = value
        return found

    def _restore(self, state: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        try:
            self.state = State(**state)
            for name, parameter in self._parameters.items():
                parameter.data.copy_(tensors[f"parameter.{name}"])
                self._optimizer.state[parameter] = {
                    # The count of steps stays on the CPU, as the optimiser makes it.
                    key: value if key == "step" else value.to(parameter.device)
                    for key in ("step", "exp_avg", "exp_avg_sq")
                    if (value := tensors.get(f"{key}.{name}")) is not None
                }
        except (KeyError, TypeError, RuntimeError) as error:
            path = self._directory.path / "checkpoint"
            raise UserError(f"{str(path)!r} is no checkpoint of this student: {error}") from None


def best_precision(device: torch.device) -> str:
    """bfloat16 where the device multiplies it several times faster: a GPU, or a CPU with
    instructions for it.
    """
    if device.type != "cpu":
        return "bfloat16"
    capabilities = torch.cpu.get_capabilities()
    fast = any(capabilities.get(name) for name in ("avx512_bf16", "amx_bf16"))
    return "bfloat16" if fast else "float32"


def _optimizer(parameters: Iterable[Tensor], settings: Settings) -> torch.optim.AdamW:
    """AdamW, with weight decay for matrices alone."""
    matrices: list[Tensor] = []
    others: list[Tensor] = []
    for each in parameters:
        (matrices if each.dim() > 1 else others).append(each)
    groups: list[dict[str, Any]] = [
        {"params": matrices},
        {"params": others, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=settings.learning_rate,
        betas=_BETAS,
        weight_decay=settings.weight_decay,
    )


def learning_rate(settings: Settings, step: int, steps: int) -> float:
    """Rises evenly to the highest, then falls along half a cosine; `step` counts from 0."""
    rising = max(1, round(settings.warmup * steps))
    if step < rising:
        return settings.learning_rate * (step + 1) / rising
    done = (step - rising) / max(1, steps - rising)
    low = settings.final_rate
    return settings.learning_rate * (low + (1 - low) * 0.5 * (1 + math.cos(math.pi * done)))


def acceptance_record(counts: AcceptanceCounts) -> dict[str, Any]:
    """What is logged, and printed as JSON, of an evaluation."""
    return {
        "mean_acceptance_length": round(counts.mean_acceptance_length, 4),
        "acceptance_by_position": [round(x, 4) for x in counts.acceptance_by_position],
        "conditional_acceptance_by_position": [
            round(x, 4) for x in counts.conditional_acceptance_by_position
        ],
        "drafts": counts.num_drafts,
    }
