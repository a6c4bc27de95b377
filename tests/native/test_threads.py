"""The pool of threads: many callers, forks and counts of threads never change a result."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from foredraft.kernels.native import NativeKernels


def test_many_python_threads_share_the_kernels() -> None:
    kernels = NativeKernels(2)
    packed = kernels.pack(torch.randn(600, 300))
    inputs = [torch.randn(rows, 300) for rows in range(1, 17)]
    expected = [kernels.linear(x, packed) for x in inputs]

    def work(start: int) -> bool:
        order = [(start + i) % len(inputs) for i in range(60)]
        return all(torch.equal(kernels.linear(inputs[i], packed), expected[i]) for i in order)

    with ThreadPoolExecutor(4) as executor:
        assert all(executor.map(work, range(8)))


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_more_threads_than_cores_or_tasks(threads: int) -> None:
    kernels = NativeKernels(threads)
    assert kernels.num_threads == threads
    x = torch.randn(1, 8)
    weight = torch.randn(3, 8)
    torch.testing.assert_close(kernels.linear(x, kernels.pack(weight)), x @ weight.T)


def test_the_default_is_every_core_that_the_process_may_use() -> None:
    from foredraft._native import available_cores

    assert NativeKernels().num_threads == available_cores() >= 1


def run_script(script: str) -> str:
    result = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


START = """
import os, torch
from foredraft.kernels.native import NativeKernels
kernels = NativeKernels(3)
packed = kernels.pack(torch.ones(500, 64))
first = kernels.linear(torch.ones(2, 64), packed)
"""


def test_a_forked_child_computes_without_the_workers() -> None:
    script = START + (
        "child = os.fork()\n"
        "if child == 0:\n"
        "    same = torch.equal(kernels.linear(torch.ones(2, 64), packed), first)\n"
        "    os._exit(0 if same else 1)\n"
        "print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))\n"
    )
    assert run_script(script).strip() == "0"


def test_a_child_that_was_forked_while_workers_woke_up_computes_too() -> None:
    """And ends its pool: what a worker held or waited for at the fork is nobody's in the child."""
    script = START + (
        "import time\n"
        "for _ in range(150):\n"
        "    time.sleep(1e-3)\n"  # the workers fall asleep
        "    kernels.linear(torch.ones(2, 64), packed)\n"
        "    child = os.fork()\n"
        "    if child == 0:\n"
        "        same = all(torch.equal(kernels.linear(torch.ones(2, 64), packed), first)\n"
        "                   for _ in range(3))\n"
        "        del kernels\n"
        "        os._exit(0 if same else 1)\n"
        "    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0\n"
        "print(0)\n"
    )
    assert run_script(script).strip() == "0"


def test_the_interpreter_ends_cleanly_with_live_workers() -> None:
    assert run_script(START + "print(float(first[0, 0]))").strip() == "64.0"
