"""The `--plot` option of every command that draws: refused early, written at the end.

Knows file names and that matplotlib may be missing; knows nothing of what is drawn.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from foredraft.core.errors import UserError

PNG = ".png"
PNG_OR_SVG = (".png", ".svg")


def check_plot(plot: Path | None, *suffixes: str) -> None:
    """Raise UserError, before minutes are spent, for a plot that could not be drawn or written.

    `suffixes` are the endings that the command can draw, such as ".png".
    """
    if plot is None:
        return
    if plot.suffix not in suffixes:
        raise UserError(f"--plot {str(plot)!r}: give a name in {' or '.join(suffixes)}")
    if not plot.parent.is_dir():
        raise UserError(f"--plot {str(plot)!r}: there is no directory {str(plot.parent)!r}")
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise UserError("plots need matplotlib: pip install 'foredraft[plots]'") from None


def write_plot(plot: Path, draw: Callable[[str], bytes]) -> None:
    """Write what `draw` makes of the form that the plot's name says, such as "png".

    Raises UserError where the file cannot be written.
    """
    try:
        plot.write_bytes(draw(plot.suffix.removeprefix(".")))
    except OSError as error:
        raise UserError(f"cannot write --plot {str(plot)!r}: {error.strerror}") from None
