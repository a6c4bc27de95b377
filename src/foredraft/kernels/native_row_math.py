"""The sampler's reductions over rows of the vocabulary, compiled: one call for all rows of a step.

Knows tensors' shapes and dtypes; computes nothing. A row's result depends on that row alone.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

import foredraft._native as _native
from foredraft.core.row_math import NoiseKey
from foredraft.core.truncation import Truncation

_MASK64 = 0xFFFFFFFFFFFFFFFF

_DTYPES = (torch.float32, torch.float64)


class NativeRowMath:
    """`RowMath` in C++: fixed orders of sums, no dependence on threads.

    Rows that are not contiguous CPU tensors of one length and dtype raise ValueError.
    """

    def __init__(self, runtime: _native.Runtime) -> None:
        self._runtime = runtime

    def argmax_rows(self, rows: Tensor) -> list[int]:
        """See `RowMath`; `rows` `[R, V]` of float32 or float64."""
        if not rows.shape[0]:
            return []
        ids: list[int] = self._runtime.argmax_rows(*_matrix(rows))
        return ids

    def top_ids(self, rows: Tensor, k: int) -> list[list[int]]:
        """See `RowMath`; equal values in the order of their ids, NaN passed over."""
        if not len(rows):
            return []
        ids: list[list[int]] = self._runtime.top_ids(*_matrix(rows), min(k, rows.shape[-1]))
        return ids

    def draws(
        self, rows: Sequence[Tensor], truncations: Sequence[Truncation], keys: Sequence[NoiseKey]
    ) -> list[int]:
        """See `RowMath`."""
        if not rows:
            return []
        _check(rows)
        ids: list[int] = self._runtime.draws(
            _sampled(rows, truncations, keys), len(rows[0]), rows[0].dtype is torch.float64
        )
        return ids

    def laws(
        self, rows: Sequence[Tensor], truncations: Sequence[Truncation]
    ) -> tuple[Sequence[Tensor], list[int]]:
        """See `RowMath`."""
        if not rows:
            return [], []
        _check(rows)
        laws = torch.empty(len(rows), len(rows[0]), dtype=torch.float64)
        ids: list[int] = self._runtime.laws(
            _sampled(rows, truncations, [(0, 0)] * len(rows)),
            len(rows[0]),
            rows[0].dtype is torch.float64,
            laws.data_ptr(),
        )
        return laws.unbind(), ids

    def log_softmax(self, row: Tensor) -> Tensor:
        """See `RowMath`; NaN where the row holds one."""
        _check([row])
        out = torch.empty(len(row), dtype=torch.float64)
        self._runtime.log_softmax(
            row.data_ptr(), len(row), row.dtype is torch.float64, out.data_ptr()
        )
        return out

    def total(self, weights: Tensor) -> float:
        """See `RowMath`."""
        return float(self._runtime.total(*_weights(weights)))

    def draw(self, weights: Tensor, coin: float) -> int | None:
        """See `RowMath`."""
        drawn = int(self._runtime.draw(*_weights(weights), coin))
        return None if drawn < 0 else drawn


def _sampled(
    rows: Sequence[Tensor], truncations: Sequence[Truncation], keys: Sequence[NoiseKey]
) -> list[tuple[int, float, float, int, float, int, int]]:
    return [
        (
            row.data_ptr(),
            cut.temperature,
            cut.min_p,
            cut.top_k,
            cut.top_p,
            seed & _MASK64,
            position & _MASK64,
        )
        for row, cut, (seed, position) in zip(rows, truncations, keys, strict=True)
    ]


def _matrix(rows: Tensor) -> tuple[int, int, int, bool]:
    """Address, rows, row length, whether float64. Raises ValueError for what cannot be read."""
    shape, dtype = rows.shape, rows.dtype
    fits = len(shape) == 2 and shape[1] and rows.is_contiguous() and rows.is_cpu
    if not fits or dtype not in _DTYPES:
        raise _refusal("rows", rows)
    return rows.data_ptr(), shape[0], shape[1], dtype is torch.float64


def _check(rows: Sequence[Tensor]) -> None:
    """Raise ValueError unless the extension can read all of `rows` alike."""
    first = rows[0]
    for row in rows:
        fits = row.dim() == 1 and len(row) and row.is_contiguous() and row.is_cpu
        alike = row.dtype is first.dtype and len(row) == len(first)
        if not fits or not alike or row.dtype not in _DTYPES:
            raise _refusal("a row", row)


def _weights(weights: Tensor) -> tuple[int, int]:
    if weights.dtype is not torch.float64:
        raise _refusal("weights", weights)
    _check([weights])
    return weights.data_ptr(), len(weights)


def _refusal(what: str, tensor: Tensor) -> ValueError:
    return ValueError(
        f"{what} must be a contiguous CPU tensor over the vocabulary, of float32 or float64"
        f" (weights: float64), got {tensor.dtype} {tuple(tensor.shape)} on {tensor.device}"
    )
