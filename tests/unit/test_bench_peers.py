"""Talking with a peer's process."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from foredraft.bench.peers import Peer

ECHO = """
import json, sys
settings = json.loads(sys.stdin.readline())
sys.stderr.write("loading " * 20_000)
print(json.dumps({}), flush=True)
for line in sys.stdin:
    prompt = json.loads(line)
    if prompt == [0]:
        sys.exit("no memory")
    answer = {"token_ids": prompt * settings["max_tokens"], "seconds": 0.5}
    print(json.dumps({"float32": answer}), flush=True)
"""


def start(code: str) -> Peer:
    settings = {"max_tokens": 50_000, "eos_token_ids": [2], "threads": 1}
    return Peer("an echo", Path("m"), command=[sys.executable, "-c", code], **settings)


def test_long_answers_and_much_to_say_on_stderr_do_not_block() -> None:
    with start(ECHO) as peer:
        for prompt in ([1, 2], [3]):
            answer = peer.generate(prompt)["float32"]
            assert answer["token_ids"] == prompt * 50_000
            assert answer["seconds"] == 0.5


def test_a_peer_that_fails_is_quoted() -> None:
    with pytest.raises(RuntimeError, match="peer an echo failed:\nno model"):
        start("import sys; sys.stdin.readline(); sys.exit('no model')")
    with start(ECHO) as peer, pytest.raises(RuntimeError, match="no memory"):
        peer.generate([0])
