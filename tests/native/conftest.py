"""What the native tests share; without the compiled extension there is nothing here to test."""

from __future__ import annotations

import importlib.util
import os
import sys

import pytest


def load_sanitized_extension() -> None:
    """`make sanitize` names an extension built with sanitizers; it must be the one that loads."""
    path = os.environ.get("FOREDRAFT_TEST_EXTENSION")
    if not path:
        return
    spec = importlib.util.spec_from_file_location("foredraft._native", path)
    if spec is None or spec.loader is None:
        raise ImportError(f"no extension at {path}")
    module = importlib.util.module_from_spec(spec)
    sys.modules["foredraft._native"] = module
    spec.loader.exec_module(module)


def native_status() -> str:
    load_sanitized_extension()
    from foredraft.kernels import catalog

    return catalog.native_status()


STATUS = native_status()
# An installation without a compiler is a supported one: it runs on the reference kernels alone.
collect_ignore_glob = [] if STATUS.startswith("available") else ["test_*.py"]


def pytest_report_header() -> str:
    return f"native kernels: {STATUS}"


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "instruction_set" in metafunc.fixturenames:
        from foredraft._native import instruction_sets

        metafunc.parametrize("instruction_set", instruction_sets())


@pytest.fixture(scope="session", autouse=True)
def _living_pools() -> list[object]:
    """Pools of threads end with their last user; each example would start its own again."""
    from foredraft.kernels.native import NativeKernels

    return [NativeKernels(threads) for threads in (1, 2, 3)]
