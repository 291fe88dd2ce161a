"""Matrices of 4-bit floats (E2M1), two a byte, the lower half first.

mxfp4, in the experts of gpt-oss:     w[e, o, i] = FP4[q[e, o, i]] * 2^(s[e, o, i // 32] - 127)
nvfp4, of ModelOpt:                   w[o, i] = FP4[q[o, i]] * s[o, i // 16] * t        s in e4m3, t in f32
nvfp4, of compressed-tensors:         w[o, i] = FP4[q[o, i]] * s[o, i // 16] / t
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from adaserve_jax.models.checkpoint_formats.encoding import FLOATS, WEIGHT, Part, StoredMatrix, StoredStack, span
from adaserve_jax.models.checkpoint_formats.scaled import FLOAT8, powers

MX_BLOCK, NV_BLOCK = 32, 16
"""Inputs that share a scale."""
BLOCKS, SCALES = "blocks", "scales"
_SCALE, _BYTES = "weight_scale", ("U8",)
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_VALUES = np.array([*_MAGNITUDES, *(-each for each in _MAGNITUDES)], np.float32)
_PAIRS = np.stack([_VALUES[np.arange(256) & 15], _VALUES[np.arange(256) >> 4]], axis=-1)
"""f32[256, 2]: the values of a byte's two halves."""


@dataclass(frozen=True)
class Mxfp4:
    """Matrices of all experts, outputs one below another, as [experts, out, in / 32, bytes]."""

    def parts(self, stored: StoredStack) -> dict[str, Part]:
        experts, inputs, outputs = stored.shape
        groups = inputs // MX_BLOCK
        return {
            BLOCKS: Part(((experts, outputs, groups, MX_BLOCK // 2),), _BYTES),
            SCALES: Part(((experts, outputs, groups),), ("U8", "F8_E8M0")),
        }

    def decode(self, stored: StoredStack, expert: int) -> np.ndarray:
        one = slice(expert, expert + 1)
        scale = powers(stored.read(SCALES, one)[0])
        values = _PAIRS[stored.read(BLOCKS, one)[0]].reshape(*scale.shape, MX_BLOCK)
        return (values * scale[..., None]).reshape(len(scale), -1)


@dataclass(frozen=True)
class Nvfp4:
    """One matrix, as [out, in / 2] bytes.

    packed, whole: names of the tensors of values, and of the scale of the whole matrix. divides: the values are
    divided by that scale, as compressed-tensors writes it.
    """

    packed: str
    whole: str
    divides: bool

    @property
    def in_4_bits(self) -> bool:
        return False

    def parts(self, stored: StoredMatrix) -> dict[str, Part]:
        outputs, inputs = stored.shape
        return {
            self.packed: Part(((outputs, inputs // 2),), _BYTES),
            _SCALE: Part(((outputs, inputs // NV_BLOCK),), (FLOAT8,)),
            self.whole: Part(((), (1,)), FLOATS),
        }

    def decode(self, stored: StoredMatrix, rows: slice, columns: slice) -> np.ndarray:
        blocks = span(columns, NV_BLOCK)
        of_blocks = slice(blocks.start * NV_BLOCK // 2, blocks.stop * NV_BLOCK // 2)
        scale = stored.read(_SCALE, rows, blocks).astype(np.float32)
        whole = stored.read(self.whole).astype(np.float32).reshape(())
        scale = scale / whole if self.divides else scale * whole
        values = _PAIRS[stored.read(self.packed, rows, of_blocks)].reshape(*scale.shape, NV_BLOCK)
        first = columns.start - blocks.start * NV_BLOCK
        found = (values * scale[..., None]).reshape(len(scale), -1)
        return found[:, first : first + columns.stop - columns.start]


MODELOPT_FP4 = Nvfp4(WEIGHT, "weight_scale_2", divides=False)
COMPRESSED_FP4 = Nvfp4("weight_packed", "weight_global_scale", divides=True)
