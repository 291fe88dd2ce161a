"""Describes how a checkpoint stores its matrices: the tensors that make up each, and the modules that are quantised.

An encoding computes parts of a matrix from parts of its tensors, so that a load never holds a whole one in full
precision. Arithmetic is in f32.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Protocol

import numpy as np

FLOATS = ("F16", "BF16", "F32", "F64")
"""safetensors' names of the types of full precision."""
WEIGHT = "weight"
_NOT_OF_LAYERS = re.compile(r"(lm_head|embed_tokens|gate|router)\W*$")
"""Ends of patterns of modules that int4 does not hold: head, embedding and routers."""
Shape = tuple[int, ...]


@dataclass(frozen=True)
class Part:
    """One tensor of a stored matrix: the shapes that it may have, and safetensors' names of its types."""

    shapes: tuple[Shape, ...]
    types: tuple[str, ...]


class StoredTensors(Protocol):
    """Tensors that stand for one weight together, by the ends of their names ("weight", "weight_scale")."""

    def __contains__(self, name: str) -> bool: ...

    def read(self, name: str, *index: slice) -> np.ndarray:
        """Return a part of a tensor in its own type. index: one slice with bounds, or slice(None), of each axis."""
        ...

    def location(self, name: str) -> str:
        """Return the file and the whole name of a tensor, for messages."""
        ...


class StoredMatrix(StoredTensors, Protocol):
    """The tensors of one matrix."""

    @property
    def shape(self) -> tuple[int, int]:
        """Outputs and inputs of the matrix."""
        ...


class StoredStack(StoredTensors, Protocol):
    """The tensors of the matrices of all experts."""

    @property
    def shape(self) -> tuple[int, int, int]:
        """Experts, inputs and outputs."""
        ...


class Encoding(Protocol):
    """One way to store a matrix [out, in]."""

    @property
    def in_4_bits(self) -> bool:
        """Whether int4 holds the values as they are: at most 4 bits, in groups of whole groups of int4."""
        ...

    def parts(self, stored: StoredMatrix) -> dict[str, Part]:
        """Return the tensors that must be there, by their names behind the module's."""
        ...

    def decode(self, stored: StoredMatrix, rows: slice, columns: slice) -> np.ndarray:
        """Return f32[rows, columns] of the matrix. rows, columns: with bounds inside its shape."""
        ...


class StackEncoding(Protocol):
    """One way to store the matrices of all experts together."""

    def parts(self, stored: StoredStack) -> dict[str, Part]:
        """Return the tensors that must be there, by the ends of their names, which follow the stack's and "_"."""
        ...

    def decode(self, stored: StoredStack, expert: int) -> np.ndarray:
        """Return f32[out, in] of one expert."""
        ...


@dataclass(frozen=True)
class Rule:
    """Modules that an encoding holds for. names: patterns of their names, as `matches` reads them; empty: all."""

    encoding: Encoding
    names: tuple[str, ...] = ()


@dataclass(frozen=True)
class WeightFormat:
    """The format of a quantised checkpoint.

    title: for people. rules: the first that a module matches holds. kept: patterns of modules in full precision.
    unread: names of tensors behind a module's that serving does not need, such as scales of activations. zeros: of
    those that it does not need where all their values are 0. stacks: of tensors that hold all experts; None: these are
    in full precision.
    """

    title: str
    rules: tuple[Rule, ...]
    kept: tuple[str, ...] = ()
    unread: tuple[str, ...] = ()
    zeros: tuple[str, ...] = ()
    stacks: StackEncoding | None = None

    @property
    def in_4_bits(self) -> bool:
        """Return whether int4 holds the matrices of all layers as they are, by the configuration.

        A file may have some in full precision all the same.
        """
        by_rules = all(rule.encoding.in_4_bits and not rule.names for rule in self.rules)
        return bool(self.rules) and by_rules and all(_NOT_OF_LAYERS.search(pattern) for pattern in self.kept)

    def encoding_of(self, module: str) -> Encoding | None:
        """Return how the configuration says that a module's matrix is stored; None: in full precision."""
        if any(matches(pattern, module) for pattern in self.kept):
            return None
        for rule in self.rules:
            if not rule.names or any(matches(pattern, module) for pattern in rule.names):
                return rule.encoding
        return None


def matches(pattern: str, module: str) -> bool:
    """Return True if a pattern names a module: as a run of whole parts of its name.

    A pattern that begins with "re:" is a regular expression for the beginning of the name, as in compressed-tensors;
    one with "*" stands for the whole name, as in ModelOpt's files.
    """
    if pattern.startswith("re:"):
        return re.match(pattern[3:], module) is not None
    if "*" in pattern:
        return fnmatchcase(module, pattern)
    return f".{module}.".find(f".{pattern}.") >= 0


def span(index: slice, block: int) -> slice:
    """Return the blocks that a range of values lies in."""
    return slice(index.start // block, -(-index.stop // block))
