"""`foredraft train data | features | ngram | eagle3 | medusa | draft | eval`: drafters of answers.

Knows the list of commands; each lives in its own file.
"""

from __future__ import annotations

import typer

from foredraft.cli import train_data, train_eval, train_features, train_heads, train_ngram
from foredraft.cli.interrupts import ModelCommand

app = typer.Typer(
    help="Make drafters of a target's own answers, and measure them.",
    no_args_is_help=True,
)
app.command("data", cls=ModelCommand)(train_data.data)
app.command("features", cls=ModelCommand)(train_features.features)
app.command("ngram", cls=ModelCommand)(train_ngram.ngram)
app.command("eagle3", cls=ModelCommand)(train_heads.eagle3)
app.command("medusa", cls=ModelCommand)(train_heads.medusa)
app.command("draft", cls=ModelCommand)(train_heads.draft)
app.command("eval", cls=ModelCommand)(train_eval.evaluate)
