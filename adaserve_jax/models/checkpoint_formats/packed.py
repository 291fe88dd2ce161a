"""Matrices of integers of a few bits in words of 32, with a scale, and a zero, of each group of inputs.

    w[o, i] = (q[o, i] - z[o, g]) * s[o, g]        g: the group of input i; q and z from 0 to 2^bits - 1

GPTQ and AWQ store [in, out]; GPTQ packs along the inputs, AWQ along the outputs. compressed-tensors stores [out, in]
and packs along the inputs.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from adaserve_jax.config import INT4_GROUP
from adaserve_jax.errors import CheckpointError
from adaserve_jax.models.checkpoint_formats.encoding import FLOATS, Part, StoredMatrix, span
from adaserve_jax.models.checkpoint_formats.scaled import ZEROS

WORD_BITS = 32
AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""Nibble of a word, from the lowest, that holds each of its eight values."""
_WORDS, _QWEIGHT, _QZEROS, _SCALES, _GROUP_INDEX = ("I32",), "qweight", "qzeros", "scales", "g_idx"
_UNLISTED = -1
"""Group of every input in an index that compressed-tensors wrote but did not use."""
_PACKED, _SCALE, _SHAPE, _CT_INDEX = "weight_packed", "weight_scale", "weight_shape", "weight_g_idx"


@dataclass(frozen=True)
class Grouped:
    """Rows of a matrix as they are stored. values: u8[rows, columns]; zeros: u8[rows, G] and scales: f32[rows, G] of G
    groups; group_of: the group of each column."""

    values: np.ndarray
    zeros: np.ndarray
    scales: np.ndarray
    group_of: np.ndarray

    def decoded(self) -> np.ndarray:
        """Return f32[rows, columns]."""
        zeros = self.zeros.astype(np.float32)
        return (self.values - zeros[:, self.group_of]) * self.scales[:, self.group_of]

    def regrouped(self, size: int) -> tuple[np.ndarray, np.ndarray, np.ndarray] | None:
        """Return values, and scales and zeros of each `size` columns; None: some of these are of several groups."""
        members = self.group_of.reshape(-1, size)
        first = members[:, 0]
        if (members != first[:, None]).any():
            return None
        return self.values, self.scales[:, first], self.zeros[:, first]


@dataclass(frozen=True)
class Packed(ABC):
    """Decode weights of a few bits from words of 32; the base of both layouts.

    group_size: inputs that share a scale; 0 for all. any_order: inputs of a group are anywhere, and the file must say
    where; it may say so of others too.
    """

    bits: int
    group_size: int
    any_order: bool = field(default=False, kw_only=True)

    @property
    def in_4_bits(self) -> bool:
        return self.bits <= 4 and self.group_size % INT4_GROUP == 0 and not self.any_order

    def decode(self, stored: StoredMatrix, rows: slice, columns: slice) -> np.ndarray:
        return self.read(stored, rows, columns).decoded()

    @abstractmethod
    def read(self, stored: StoredMatrix, rows: slice, columns: slice) -> Grouped:
        """Return a part of the matrix as it is stored."""


@dataclass(frozen=True)
class InputsFirst(Packed):
    """GPTQ's and AWQ's layout.

    along_inputs: a word holds values of one output, else of one input. order: of the values in a word. zeros_less_one:
    zeros are stored less one, as GPTQ's first version does.
    """

    along_inputs: bool
    order: tuple[int, ...]
    zeros_less_one: bool = False

    def parts(self, stored: StoredMatrix) -> dict[str, Part]:
        outputs, inputs = stored.shape
        groups = _groups(inputs, self.group_size)
        packed = (self._words(inputs), outputs) if self.along_inputs else (inputs, self._words(outputs))
        found = {
            _QWEIGHT: Part((packed,), _WORDS),
            _QZEROS: Part(((groups, self._words(outputs)),), _WORDS),
            _SCALES: Part(((groups, outputs),), FLOATS),
        }
        listed = self.any_order or _GROUP_INDEX in stored
        return found | ({_GROUP_INDEX: Part(((inputs,),), _WORDS)} if listed else {})

    def read(self, stored: StoredMatrix, rows: slice, columns: slice) -> Grouped:
        per_word = WORD_BITS // self.bits
        if self.along_inputs:
            words = stored.read(_QWEIGHT, span(columns, per_word), rows)
            values = _within(unpack(words.T, self.order, self.bits), columns, per_word)
        else:
            words = stored.read(_QWEIGHT, columns, span(rows, per_word))
            values = _within(unpack(words, self.order, self.bits), rows, per_word).T
        groups, of_column = _group_of(stored, _GROUP_INDEX, self.group_size, columns)
        zeros = stored.read(_QZEROS, groups, span(rows, per_word))
        zero = _within(unpack(zeros, self.order, self.bits), rows, per_word)
        if self.zeros_less_one:
            zero = (zero + 1) & ((1 << self.bits) - 1)
        scale = stored.read(_SCALES, groups, rows).astype(np.float32)
        return Grouped(values, zero.T, scale.T, of_column)

    def _words(self, values: int) -> int:
        return values * self.bits // WORD_BITS


@dataclass(frozen=True)
class OutputsFirst(Packed):
    """compressed-tensors' `pack-quantized`.

    Values and zeros are stored plus 2^(bits - 1); without zeros, that is the zero. Zeros are packed along the outputs.
    """

    symmetric: bool

    def parts(self, stored: StoredMatrix) -> dict[str, Part]:
        outputs, inputs = stored.shape
        groups, per_word = _groups(inputs, self.group_size), WORD_BITS // self.bits
        found = {
            _PACKED: Part(((outputs, -(-inputs // per_word)),), _WORDS),
            _SCALE: Part(((outputs, groups),), FLOATS),
            _SHAPE: Part(((2,),), ("I64", "I32")),
        }
        if not self.symmetric:
            found[ZEROS] = Part(((-(-outputs // per_word), groups),), _WORDS)
        listed = self.any_order or _CT_INDEX in stored
        return found | ({_CT_INDEX: Part(((inputs,),), _WORDS)} if listed else {})

    def read(self, stored: StoredMatrix, rows: slice, columns: slice) -> Grouped:
        per_word = WORD_BITS // self.bits
        order = range(per_word)
        words = stored.read(_PACKED, rows, span(columns, per_word))
        values = _within(unpack(words, order, self.bits), columns, per_word)
        groups, of_column = _group_of(stored, _CT_INDEX, self.group_size, columns)
        scales = stored.read(_SCALE, rows, groups).astype(np.float32)
        if self.symmetric:
            zeros = np.full(scales.shape, 1 << (self.bits - 1), np.uint8)
        else:
            packed = stored.read(ZEROS, span(rows, per_word), groups)
            zeros = _within(unpack(packed.T, order, self.bits), rows, per_word).T
        return Grouped(values, zeros, scales, of_column)


def unpack(words: np.ndarray, order: Sequence[int], bits: int) -> np.ndarray:
    """Return u8[..., n * 32 / bits], the values that i32[..., n] hold. order: place of each value in its word."""
    shifts = np.array(order, np.uint32) * np.uint32(bits)
    values = (words.astype(np.uint32)[..., None] >> shifts) & np.uint32((1 << bits) - 1)
    return values.astype(np.uint8).reshape(*words.shape[:-1], -1)


def _within(values: np.ndarray, index: slice, per_word: int) -> np.ndarray:
    """Return the values of a range from those of all words that it lies in, along the last axis."""
    first = index.start // per_word * per_word
    return values[..., index.start - first : index.stop - first]


def _groups(inputs: int, size: int) -> int:
    return -(-inputs // (size or inputs))


def _group_of(stored: StoredMatrix, name: str, size: int, columns: slice) -> tuple[slice, np.ndarray]:
    """Return the range of groups that inputs lie in, and the place in it of each input's.

    Raises CheckpointError: the file lists a group that is not there.
    """
    inputs, found = stored.shape[1], None
    if name in stored:
        found = stored.read(name, columns)
        if np.all(found == _UNLISTED):
            found = None
    if found is None:
        found = np.arange(columns.start, columns.stop) // (size or inputs)
    first, last = (int(found.min()), int(found.max())) if len(found) else (0, 0)
    groups = _groups(inputs, size)
    if first < 0 or last >= groups:
        raise CheckpointError(
            f"{stored.location(name)} must list groups from 0 to {groups - 1}, got {first} to {last}; quantise it again"
        )
    return slice(first, last + 1), found - first
