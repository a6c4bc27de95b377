"""Other engines on the same prompts, each in a process of its own, prompt by prompt.

`python -m foredraft.bench.peers transformers` is the peer's side: it reads one JSON line of
settings, then one JSON line a prompt, and answers each with one JSON line. `Peer` is the side that
asks. Turns strictly alternate, so that neither can wait for the other, and a prompt is measured in
the same seconds here and there. Knows token ids and seconds; the peer's own package is imported in
its process only.
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
# A peer's threads go on spinning for a while after its answer, on the cores we measure on.
REST_SECONDS = 0.05
LAST_WORDS = 2000  # characters of a failed peer's stderr

Answers = dict[str, dict[str, Any]]  # per dtype: token_ids, seconds after the first token


def check_peer(name: str) -> None:
    """Raises UserError for a peer that is unknown or not installed."""
    if name not in PEERS:
        raise UserError(f"--peer {name!r} is unknown; valid are {', '.join(PEERS)}")
    if importlib.util.find_spec(name) is None:
        raise UserError(f"--peer {name} needs the package: pip install 'foredraft[{name}]'")


class Peer:
    """A running peer. Use as a context manager: leaving it ends the process."""

    def __init__(
        self,
        name: str,
        model: Path,
        *,
        max_tokens: int,
        eos_token_ids: Sequence[int],
        threads: int,
        command: Sequence[str] | None = None,
    ) -> None:
        """Start it and wait until its models are loaded. Raises RuntimeError if it fails."""
        self.name = name
        # Unlike a pipe, a file takes whatever the peer has to say, and nobody has to read it.
        folder = tempfile.TemporaryDirectory()
        self._closing = contextlib.ExitStack()
        self._closing.enter_context(folder)
        self._words = Path(folder.name) / "stderr"
        with self._words.open("w") as stderr:
            self._process = subprocess.Popen(
                command or [sys.executable, "-m", "foredraft.bench.peers", name],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stderr, text=True,
            )  # fmt: skip
        try:
            self._ask(
                {
                    "model": str(model),
                    "max_tokens": max_tokens,
                    "eos_token_ids": list(eos_token_ids),
                    "threads": threads,
                }
            )
        except BaseException:
            self.close()
            raise

    def generate(self, prompt: Sequence[int]) -> Answers:
        """Its answer to a prompt, at each dtype. Raises RuntimeError with its last words."""
        answers: Answers = self._ask(list(prompt))
        time.sleep(REST_SECONDS)
        return answers

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):
                pipe.close()
        self._process.wait()
        self._closing.close()

    def __enter__(self) -> Peer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _ask(self, question: object) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended: the empty answer tells
            self._process.stdin.write(json.dumps(question) + "\n")
            self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line.endswith("\n"):
            self._process.wait()
            words = self._words.read_text(encoding="utf-8", errors="replace")[-LAST_WORDS:]
            raise RuntimeError(f"peer {self.name} failed:\n{words}")
        return json.loads(line)


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


def _transformers(settings: dict[str, Any]) -> Callable[[list[int]], Answers]:
    """Loads the model at every dtype; the function answers a prompt."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(settings["threads"])
    path = Path(settings["model"])
    place = (
        {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name}
        if path.is_file()
        else {"pretrained_model_name_or_path": str(path)}
    )
    models = {}
    for dtype in DTYPES:
        models[dtype] = AutoModelForCausalLM.from_pretrained(**place, dtype=getattr(torch, dtype))
        models[dtype].train(False)
    options = {
        "max_new_tokens": settings["max_tokens"],
        "do_sample": False,
        "eos_token_id": settings["eos_token_ids"],
        "pad_token_id": settings["eos_token_ids"][0],
    }

    def answer(dtype: str, prompt: list[int]) -> dict[str, Any]:
        ids, clock = torch.tensor([prompt]), _Clock()
        with torch.inference_mode():
            output = models[dtype].generate(
                ids, attention_mask=torch.ones_like(ids), streamer=clock, **options
            )
        tokens = output[0, len(prompt) :].tolist()
        return {"token_ids": tokens, "seconds": clock.times[-1] - clock.times[0]}

    for dtype in DTYPES:
        answer(dtype, settings["eos_token_ids"][:1] * 8)  # unmeasured: to warm up
    return lambda prompt: {dtype: answer(dtype, prompt) for dtype in DTYPES}


def main() -> int:
    """The peer's side: settings, then prompts until there are no more."""
    name, answers = sys.argv[1], sys.stdout
    if name != "transformers":
        raise ValueError(f"unknown peer {name!r}; valid are {', '.join(PEERS)}")
    # A package's own prints must not mix with the answers.
    with contextlib.redirect_stdout(sys.stderr):
        answer = _transformers(json.loads(sys.stdin.readline()))
        answers.write("{}\n")
        answers.flush()
        for line in sys.stdin:
            answers.write(json.dumps(answer(json.loads(line))) + "\n")
            answers.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
