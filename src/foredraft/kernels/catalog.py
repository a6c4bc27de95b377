"""Which kernels there are, which of them run here, and the choice between them.

Knows names, devices and dtypes; knows no operation.
"""

from __future__ import annotations

import torch

from foredraft.kernels.interface import Kernels
from foredraft.kernels.reference import ReferenceKernels

NAMES = ("auto", "native", "reference")


def native_status() -> str:
    """Why the native kernels are missing, or the CPU instruction set that they use here."""
    try:
        from foredraft._native import best_instruction_set
    except ImportError as error:
        return f"not available: the compiled extension is missing ({error})"
    return f"available: {best_instruction_set()}"


def native_available() -> bool:
    """Whether the compiled extension is there and loads."""
    return native_status().startswith("available")


def load_kernels(
    name: str = "auto",
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    num_threads: int | None = None,
) -> Kernels:
    """The kernels called `name` for activations of `dtype` on `device`.

    "auto" is native where the extension exists, the device is a CPU and the activations are
    float32; else reference.
    Raises ValueError for an unknown name, or where "native" cannot serve what is asked.
    """
    if name not in NAMES:
        raise ValueError(f"unknown kernels {name!r}; valid are {', '.join(NAMES)}")
    fits = torch.device(device).type == "cpu" and dtype == torch.float32
    if name == "native":
        if not fits:
            raise ValueError(
                f"native kernels compute in float32 on the CPU, not in {dtype} on {device}; "
                "use the reference kernels"
            )
        if not native_available():
            raise ValueError(f"native kernels are {native_status()}; use the reference kernels")
    if name == "native" or (name == "auto" and fits and native_available()):
        from foredraft.kernels.native import NativeKernels

        return NativeKernels(num_threads)
    return ReferenceKernels(dtype, device)
