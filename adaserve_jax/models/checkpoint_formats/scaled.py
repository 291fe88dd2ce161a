"""Matrices of 8-bit values, fp8 or int8, with scales of the whole matrix, of rows, groups of inputs, or blocks.

w[o, i] = (q[o, i] - z[o // m, i // n]) * s[o // m, i // n]        z = 0 where symmetric
"""

from __future__ import annotations

from dataclasses import dataclass

import ml_dtypes
import numpy as np

from adaserve_jax.models.checkpoint_formats.encoding import FLOATS, WEIGHT, Part, StoredMatrix, span

FLOAT8, INT8 = "F8_E4M3", "I8"
_POWERS = ("F8_E8M0", "U8")
"""Types of scales that are powers of two: biased exponents."""
_VALUES = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
ZEROS = "weight_zero_point"


@dataclass(frozen=True)
class Scaled:
    """Values of one byte with scales.

    dtype: FLOAT8 or INT8. block: outputs and inputs that share a scale, 0 for all; None: the file has one scale of the
    matrix, or one of each row. scale_names: names of the scales' tensor, of which the file has one.
    """

    dtype: str
    block: tuple[int, int] | None
    scale_names: tuple[str, ...] = ("weight_scale",)
    symmetric: bool = True

    @property
    def in_4_bits(self) -> bool:
        return False

    def parts(self, stored: StoredMatrix) -> dict[str, Part]:
        shapes = self._grids(stored.shape)
        parts = {
            WEIGHT: Part((stored.shape,), (self.dtype,)),
            self._scale_name(stored): Part(shapes, FLOATS + (_POWERS if self.dtype == FLOAT8 else ())),
        }
        return parts if self.symmetric else parts | {ZEROS: Part(shapes, (INT8, *FLOATS))}

    def decode(self, stored: StoredMatrix, rows: slice, columns: slice) -> np.ndarray:
        given = stored.read(WEIGHT, rows, columns)
        values = _VALUES[given.view(np.uint8)] if self.dtype == FLOAT8 else given.astype(np.float32)
        if not self.symmetric:
            values -= self._expand(stored, ZEROS, rows, columns)
        values *= self._expand(stored, self._scale_name(stored), rows, columns)
        return values

    def row_scales(self, stored: StoredMatrix, rows: slice) -> np.ndarray | None:
        """Return f32[rows] if the matrix is int8 with one scale for each row, or for all; else None."""
        if self.dtype != INT8 or not self.symmetric or self.block is None or self.block[1]:
            return None
        scales = self._expand(stored, self._scale_name(stored), rows, slice(0, 1))
        return np.broadcast_to(scales, (rows.stop - rows.start, 1))[:, 0]

    def _scale_name(self, stored: StoredMatrix) -> str:
        return next((name for name in self.scale_names if name in stored), self.scale_names[0])

    def _grids(self, shape: tuple[int, int]) -> tuple[tuple[int, ...], ...]:
        """Return the shapes that the scales may have."""
        one, by_row = ((1,), (), (1, 1)), ((shape[0], 1), (shape[0],))
        if self.block is None:
            return one + by_row
        if self.block == (0, 0):
            return one
        if self.block == (1, 0):
            return by_row
        blocks = ((block or size, size) for block, size in zip(self.block, shape, strict=True))
        return (tuple(-(-size // block) for block, size in blocks),)

    def _expand(self, stored: StoredMatrix, name: str, rows: slice, columns: slice) -> np.ndarray:
        """Return f32 that broadcasts to [rows, columns]."""
        if self.block is None or not self.block[1]:
            whole = powers(stored.read(name)).reshape(-1, 1)
            return whole if len(whole) == 1 else whole[rows]
        high, wide = (block or size for block, size in zip(self.block, stored.shape, strict=True))
        found = powers(stored.read(name, span(rows, high), span(columns, wide)))
        at_rows = np.arange(rows.start, rows.stop) // high - rows.start // high
        at_columns = np.arange(columns.start, columns.stop) // wide - columns.start // wide
        return found[at_rows[:, None], at_columns]


def powers(scales: np.ndarray) -> np.ndarray:
    """Return scales in f32; those of one byte without sign are powers of two, 2^(byte - 127)."""
    if scales.dtype not in (np.dtype(np.uint8), np.dtype(ml_dtypes.float8_e8m0fnu)):
        return scales.astype(np.float32)
    exponents = scales.view(np.uint8).astype(np.int32) - 127
    return np.where(exponents == 128, np.float32(np.nan), np.ldexp(np.float32(1), exponents))
