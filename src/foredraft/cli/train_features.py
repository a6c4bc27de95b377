"""`foredraft train features`: the target's hidden states are kept beside its answers.

Knows options and how progress looks; `training.keeping` does the work.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Annotated

from typer import Option

from foredraft.cli.console import message_console
from foredraft.cli.option_groups import option_groups
from foredraft.cli.options import JsonFlag, ModelArgument, PlaceOptions
from foredraft.cli.train_options import DataOption
from foredraft.core.errors import ConfigError, UserError


@option_groups
def features(
    model: ModelArgument,
    data: DataOption,
    depth: Annotated[
        list[int] | None,
        Option(
            help="Keep what enters this layer; may be repeated. (default: the three that an "
            "EAGLE-3 head reads)",
            metavar="N",
        ),
    ] = None,
    batch_tokens: Annotated[
        int, Option(help="Tokens of a pass, padding counted.", metavar="N", min=2)
    ] = 4096,
    json_output: JsonFlag = False,
    *,
    place: PlaceOptions,
) -> None:
    """Keep the target's hidden states, so that training need not compute them in every epoch.

    Two bytes a number: a token takes 2 (depths + 1) hidden_size bytes. Run it again after a stop
    and it goes on.
    """
    loaded = place.load(model)
    from foredraft.models.heads.config import default_feature_layers
    from foredraft.training.keeping import keep_features
    from foredraft.training.opening import check_target
    from foredraft.training.target import Target

    sha256 = check_target(data, loaded)
    count = loaded.config.num_layers
    for each in depth or []:
        if not 0 <= each <= count:
            raise ConfigError(f"--depth {each} is outside the target's 0 to {count}")
    depths = sorted(set(depth or default_feature_layers(count)))
    try:
        with _shown(json_output) as report:
            keep_features(
                Target(loaded), sha256, data, depths, batch_tokens=batch_tokens, report=report
            )
    except OSError as error:
        raise UserError(f"cannot write to {str(data)!r}: {error.strerror}") from None


@contextmanager
def _shown(json_output: bool) -> Iterator[Callable[[int, int], None]]:
    """A line of JSON for each shard, or a bar with the time left on a terminal."""
    from rich import progress

    def line(done: int, total: int) -> None:
        sys.stdout.write(f"{json.dumps({'tokens': done, 'of': total})}\n")
        sys.stdout.flush()

    if json_output:
        yield line
        return
    console = message_console()
    columns = (
        progress.TextColumn("tokens"),
        progress.BarColumn(),
        progress.MofNCompleteColumn(),
        progress.TimeElapsedColumn(),
        progress.TimeRemainingColumn(),
    )
    bar = progress.Progress(*columns, console=console, disable=not console.is_terminal)
    with bar:
        task = bar.add_task("", total=None)
        yield lambda done, total: bar.update(task, total=total, completed=done)
