"""The interpreter may end while threads compute: it waits for their steps and ends normally."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import atexit, threading
# Registered before the library's own, so called after it.
atexit.register(lambda: print(len(LLM(target).generate([[1]], params))))
import torch
from foredraft import LLM, SamplingParams
from foredraft.testing.models import tiny_model

torch.set_num_threads(1)
target, params = tiny_model(seed=1, vocab_size=32), SamplingParams(temperature=0.8, max_tokens=9)
begun = threading.Semaphore(0)

def generate(llm):
    while llm.generate([[1, 2, 3]] * 3, params):
        begun.release()

def stream(llm):
    while list(llm.stream([1, 2, 3], params)):
        begun.release()

for call in (generate, stream):
    threading.Thread(target=call, args=(LLM(target),), daemon=True).start()
for _ in range(20):
    assert begun.acquire(timeout=60)
"""


def test_a_program_ends_while_daemon_threads_generate():
    """Without waiting, a thread that is ended inside a pass aborts the process (status -6); the
    main thread itself may generate until the very end.
    """
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "1\n", "")
