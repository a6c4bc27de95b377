"""`foredraft train data`: the target answers prompts, and the answers are kept for training.

Knows options and how progress looks; `training.generate` does the work.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Option

from foredraft.cli.option_groups import option_groups
from foredraft.cli.options import JsonFlag, ModelArgument, RuntimeOptions
from foredraft.core.errors import ConfigError, UserError

if TYPE_CHECKING:
    from foredraft.models.load import LoadedModel
    from foredraft.training.answers import Manifest
    from foredraft.training.generate import Progress


@option_groups
def data(
    model: ModelArgument,
    prompts: Annotated[
        Path | None,
        Option(help="JSON lines with id, task and turns; first turns are asked.", metavar="FILE"),
    ] = None,
    out: Annotated[Path, Option(help="Where the answers go.", metavar="DIR")] = Path("answers"),
    temperature: Annotated[
        list[float] | None,
        Option(help="Answer all prompts at this temperature; may be repeated.", metavar="X"),
    ] = None,
    max_tokens: Annotated[
        int, Option(help="Tokens of an answer at most.", metavar="N", min=1)
    ] = 256,
    own_prompts: Annotated[
        int, Option(help="Prompts that the target writes itself, beside those.", metavar="N", min=0)
    ] = 0,
    max_num_seqs: Annotated[
        int, Option(help="Answers in the making at once.", metavar="N", min=1)
    ] = 32,
    shard_size: Annotated[
        int, Option(help="Answers of a shard; a run that is stopped loses one.", metavar="N", min=1)
    ] = 128,
    seed: Annotated[int, Option(help="Of the order of prompts and of all draws.", metavar="N")] = 0,
    json_output: JsonFlag = False,
    *,
    runtime: RuntimeOptions,
) -> None:
    """Let the target answer prompts; run it again after a stop and it goes on."""
    from foredraft import LLM
    from foredraft.bench.workload import read_workload
    from foredraft.training.generate import generate_answers

    items = [] if prompts is None else read_workload(prompts)
    texts = [item.turns[0] for item in items]
    if not texts and not own_prompts:
        raise ConfigError("nothing to answer: give --prompts FILE, --own-prompts N, or both")
    temperatures = tuple(temperature or [0.0])
    for value in temperatures:
        if not 0 <= value <= 2:
            raise ConfigError(f"--temperature {value} is outside 0 to 2")
    loaded = runtime.load(model)
    manifest = _manifest(
        loaded, texts, temperatures, own_prompts, max_tokens, seed=seed, shard_size=shard_size
    )
    llm = LLM(loaded, max_num_seqs=max_num_seqs, **runtime.engine_settings())
    try:
        with _reporting(json_output) as report:
            generate_answers(llm, texts, out, manifest, report)
    except OSError as error:
        raise UserError(f"cannot write to {str(out)!r}: {error.strerror}") from None


def _manifest(
    loaded: LoadedModel,
    texts: list[str],
    temperatures: tuple[float, ...],
    own_prompts: int,
    max_tokens: int,
    *,
    seed: int,
    shard_size: int,
) -> Manifest:
    from foredraft.bench.provenance import versions
    from foredraft.models.fingerprint import fingerprint
    from foredraft.training.answers import Manifest
    from foredraft.training.generate import digest

    return Manifest(
        target=loaded.name,
        target_sha256=fingerprint(loaded.path),
        dtype=str(loaded.dtype).removeprefix("torch."),
        vocab_size=loaded.config.vocab_size,
        template_sha256=digest([loaded.tokenizer.chat_template or ""]),
        prompts_sha256=digest(texts),
        num_prompts=len(texts),
        own_prompts=own_prompts,
        temperatures=temperatures,
        max_tokens=max_tokens,
        seed=seed,
        shard_size=shard_size,
        versions=versions(),
    )


@contextmanager
def _reporting(json_output: bool) -> Iterator[Callable[[Progress], None]]:
    """A line of JSON for each shard, or a bar with the time left on a terminal."""
    from rich import progress
    from rich.console import Console

    def line(state: Progress) -> None:
        values = {"answers": state.done, "of": state.total, "fresh_tokens": state.tokens}
        sys.stdout.write(f"{json.dumps(values)}\n")
        sys.stdout.flush()

    if json_output:
        yield line
        return
    console = Console(stderr=True)
    columns = (
        progress.TextColumn("answers"),
        progress.BarColumn(),
        progress.MofNCompleteColumn(),
        progress.TextColumn("{task.fields[tokens]} tokens"),
        progress.TimeElapsedColumn(),
        progress.TimeRemainingColumn(),
    )
    bar = progress.Progress(*columns, console=console, disable=not console.is_terminal)
    last: list[Progress] = []
    with bar:
        task = bar.add_task("", total=None, tokens=0)

        def move(state: Progress) -> None:
            last[:] = [state]
            bar.update(task, total=state.total, completed=state.done, tokens=state.tokens)

        yield move
    if last:
        console.print(
            f"{last[0].done} answers, {last[0].tokens} tokens of them written by this run"
        )
