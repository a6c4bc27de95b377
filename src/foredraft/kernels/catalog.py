"""Which kernels there are, which of them run here, and the choice between them.

Knows names, devices and dtypes; knows no operation.
"""

from __future__ import annotations

import torch

from foredraft.kernels.interface import Kernels
from foredraft.kernels.reference import ReferenceKernels

MAX_THREADS = 1024
# The native kernels read heads in whole vectors, into buffers of a fixed size.
HEAD_MULTIPLE, MAX_HEAD_DIM = 8, 256
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
    head_dim: int | None = None,
) -> Kernels:
    """The kernels called `name` for activations of `dtype` on `device` and heads of `head_dim`.

    "auto" is native where the extension exists, the device is a CPU, the activations are float32
    and `head_dim` (None: any) is one that it serves; else reference: the `name` of what is
    returned says which.
    Raises ValueError for an unknown name, a number of threads outside 1 .. 1024, or where "native"
    cannot serve what is asked.
    """
    if num_threads is not None and (
        type(num_threads) is not int or not 1 <= num_threads <= MAX_THREADS
    ):
        raise ValueError(
            f"num_threads must be an integer from 1 to {MAX_THREADS} or None, got {num_threads!r}"
        )
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
        check_head_dim(name, head_dim)
    fits = fits and _serves_heads(head_dim)
    if name == "native" or (name == "auto" and fits and native_available()):
        from foredraft.kernels.native import NativeKernels

        return NativeKernels(num_threads)
    return ReferenceKernels(dtype, device)


def check_head_dim(name: str, head_dim: int | None) -> None:
    """Raise ValueError unless the kernels called `name` serve attention heads of this size."""
    if name == "native" and not _serves_heads(head_dim):
        raise ValueError(
            f"native kernels need a head size that is a multiple of {HEAD_MULTIPLE} up to "
            f"{MAX_HEAD_DIM}, the model's is {head_dim}; use the reference kernels"
        )


def _serves_heads(head_dim: int | None) -> bool:
    return head_dim is None or (head_dim % HEAD_MULTIPLE == 0 and head_dim <= MAX_HEAD_DIM)
