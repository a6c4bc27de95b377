"""Other engines on the same prompts, each in a process of its own.

`python -m foredraft.bench.peers transformers` reads one JSON request from stdin and writes one
JSON answer to stdout; `run_peer` is the side that asks. Knows token ids and seconds; the peer's
own package is imported in its process only.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from foredraft.core.errors import UserError

PEERS = ("transformers",)
DTYPES = ("float32", "bfloat16")


def check_peer(name: str) -> None:
    """Raises UserError for a peer that is unknown or not installed."""
    if name not in PEERS:
        raise UserError(f"--peer {name!r} is unknown; valid are {', '.join(PEERS)}")
    if importlib.util.find_spec(name) is None:
        raise UserError(f"--peer {name} needs the package: pip install 'foredraft[{name}]'")


def run_peer(
    name: str,
    model: Path,
    prompts: Sequence[Sequence[int]],
    *,
    max_tokens: int,
    eos_token_ids: Sequence[int],
    threads: int,
    progress: Callable[[str], None],
) -> dict[str, list[dict[str, Any]]]:
    """Per dtype, one `{"token_ids", "seconds"}` a prompt; seconds are those after the first token.

    Raises RuntimeError with the peer's last words if it fails.
    """
    request = {
        "model": str(model),
        "prompts": [list(prompt) for prompt in prompts],
        "max_tokens": max_tokens,
        "eos_token_ids": list(eos_token_ids),
        "threads": threads,
    }
    command = [sys.executable, "-m", "foredraft.bench.peers", name]
    found: dict[str, list[dict[str, Any]]] = json.loads(
        converse(name, command, json.dumps(request), progress)
    )
    return found


def converse(
    name: str, command: Sequence[str], request: str, progress: Callable[[str], None]
) -> str:
    """What a process answers to one request; its lines `progress ...` on stderr are passed on.

    Raises RuntimeError with its last words if it fails.
    """
    words: list[str] = []
    # A file, not a pipe, takes the answer: the peer would wait for us to read a long one while we
    # wait for its last word on stderr.
    with tempfile.TemporaryFile("w+", encoding="utf-8") as answer:
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=answer, stderr=subprocess.PIPE, text=True
        )
        assert process.stdin is not None
        assert process.stderr is not None
        try:
            process.stdin.write(request)
            process.stdin.close()
            for line in process.stderr:
                if line.startswith("progress "):
                    progress(line.removeprefix("progress ").strip())
                else:
                    words = [*words[-20:], line]
            code = process.wait()
        finally:
            process.kill()
            process.wait()
            process.stderr.close()
        answer.seek(0)
        text = answer.read()
    if code != 0:
        raise RuntimeError(f"peer {name} failed:\n{''.join(words)}")
    return text


class _Clock:
    """A streamer for `generate`: notes when each token arrives."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self._saw_prompt = False

    def put(self, _value: Any) -> None:
        if self._saw_prompt:
            self.times.append(time.perf_counter())
        self._saw_prompt = True

    def end(self) -> None:
        """Nothing to do."""


def _transformers(request: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(request["threads"])
    path = Path(request["model"])
    place = (
        {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name}
        if path.is_file()
        else {"pretrained_model_name_or_path": str(path)}
    )
    found: dict[str, list[dict[str, Any]]] = {}
    for dtype in DTYPES:
        model = AutoModelForCausalLM.from_pretrained(**place, dtype=getattr(torch, dtype))
        model.train(False)
        options = {
            "max_new_tokens": request["max_tokens"],
            "do_sample": False,
            "eos_token_id": request["eos_token_ids"],
            "pad_token_id": request["eos_token_ids"][0],
        }
        found[dtype] = []
        for number, prompt in enumerate([request["prompts"][0], *request["prompts"]]):
            ids = torch.tensor([prompt])
            clock = _Clock()
            with torch.inference_mode():
                output = model.generate(
                    ids, attention_mask=torch.ones_like(ids), streamer=clock, **options
                )
            if number == 0:
                continue  # the first prompt once more, unmeasured, to warm up
            found[dtype].append(
                {
                    "token_ids": output[0, len(prompt) :].tolist(),
                    "seconds": clock.times[-1] - clock.times[0],
                }
            )
            sys.stderr.write(f"progress {dtype} {number}/{len(request['prompts'])}\n")
            sys.stderr.flush()
        del model
    return found


def main() -> int:
    """The peer's side: one request, one answer."""
    name = sys.argv[1]
    if name != "transformers":
        raise ValueError(f"unknown peer {name!r}; valid are {', '.join(PEERS)}")
    with contextlib.redirect_stdout(
        sys.stderr
    ):  # a package's own prints must not mix with the answer
        answer = _transformers(json.loads(sys.stdin.read()))
    sys.stdout.write(json.dumps(answer))
    return 0


if __name__ == "__main__":
    sys.exit(main())
