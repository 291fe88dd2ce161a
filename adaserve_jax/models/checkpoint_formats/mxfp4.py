"""Matrices of all experts in mxfp4, as gpt-oss publishes them: 4-bit floats, and a power of two for each 32 inputs.

w[e, o, i] = FP4[q[e, o, i]] * 2^(s[e, o, i // 32] - 127)        two values a byte, the lower half first
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from adaserve_jax.models.checkpoint_formats.encoding import Part, StoredStack
from adaserve_jax.models.checkpoint_formats.scaled import powers

BLOCK = 32
BLOCKS, SCALES = "blocks", "scales"
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_VALUES = np.array([*_MAGNITUDES, *(-each for each in _MAGNITUDES)], np.float32)
_PAIRS = np.stack([_VALUES[np.arange(256) & 15], _VALUES[np.arange(256) >> 4]], axis=-1)
"""f32[256, 2]: the values of a byte's two halves."""


@dataclass(frozen=True)
class Mxfp4:
    """Stores each expert's outputs one below another, as [experts, out, in / 32, bytes]."""

    def parts(self, stored: StoredStack) -> dict[str, Part]:
        experts, inputs, outputs = stored.shape
        groups = inputs // BLOCK
        return {
            BLOCKS: Part(((experts, outputs, groups, BLOCK // 2),), ("U8",)),
            SCALES: Part(((experts, outputs, groups),), ("U8", "F8_E8M0")),
        }

    def decode(self, stored: StoredStack, expert: int) -> np.ndarray:
        one = slice(expert, expert + 1)
        scale = powers(stored.read(SCALES, one)[0])
        values = _PAIRS[stored.read(BLOCKS, one)[0]].reshape(*scale.shape, BLOCK)
        return (values * scale[..., None]).reshape(len(scale), -1)
