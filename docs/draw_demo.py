"""Runs the demo in a pseudo-terminal and draws what it really printed: `make picture`.

Usage: python docs/draw_demo.py docs/demo.svg MODEL
"""

from __future__ import annotations

import io
import os
import pty
import re
import subprocess
import sys
from pathlib import Path

from rich.console import Console
from rich.text import Text

COLUMNS = 100
PROMPTS = (("examples/edit.txt", "256"), ("examples/chat.txt", "128"))


def run(command: list[str]) -> str:
    """What a command prints on a terminal, colours and all."""
    leader, follower = pty.openpty()
    environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": str(COLUMNS)}
    environment.pop("NO_COLOR", None)
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=follower, stderr=follower, env=environment
    ) as process:
        os.close(follower)
        output = b""
        while chunk := _read(leader):
            output += chunk
    os.close(leader)
    if process.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{output.decode(errors='replace')}")
    return output.decode().replace("\r\n", "\n")


def _read(leader: int) -> bytes:
    try:
        return os.read(leader, 65536)
    except OSError:  # Linux: the other end is closed
        return b""


def main() -> None:
    target, model = Path(sys.argv[1]), sys.argv[2]
    foredraft = str(Path(sys.executable).with_name("foredraft"))
    subprocess.run([foredraft, "pull", model], check=True)
    console = Console(record=True, width=COLUMNS, file=io.StringIO(), force_terminal=True)
    for prompt, tokens in PROMPTS:
        arguments = ["generate", model, "--compare", "--max-tokens", tokens]
        arguments += ["--prompt-file", prompt]
        console.print(Text(f"$ foredraft {' '.join(arguments)}", style="bold"))
        console.print(Text.from_ansi(run([foredraft, *arguments]).rstrip()))
        console.print()
    picture = console.export_svg(title="make demo", unique_id="demo")
    # The picture stands alone: the font of whoever looks at it, nothing fetched.
    picture = re.sub(r"@font-face \{.*?\}\n", "", picture, flags=re.DOTALL)
    target.write_text(picture.rstrip() + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
