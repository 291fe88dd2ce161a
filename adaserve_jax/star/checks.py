"""What is believed of a message from the other side: how much at most, and how it is told what makes no sense."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from adaserve_jax.star.messages import WireError

LARGEST = 2**31 - 1


@dataclass(frozen=True)
class Caps:
    """The most that is believed. tokens: of one message; vocabulary: token ids are below it; depth, width: of a search;
    messages: of a frame; text: characters of a name or an explanation."""

    tokens: int = 2**20
    vocabulary: int = 2**31 - 1
    depth: int = 64
    width: int = 64
    messages: int = 4096
    text: int = 512


class Check:
    """Raises WireErrors about one message. What is said is put together only when something is wrong."""

    __slots__ = ("epoch", "kind", "session")

    def __init__(self, kind: str, session: int = 0, epoch: int = 0) -> None:
        self.kind = kind
        self.session = session
        self.epoch = epoch

    def fail(self, field: str, expected: str, got: object) -> WireError:
        return WireError(f"{self.kind}.{field} must be {expected}, got {got}", self.session, self.epoch)

    def named(self) -> None:
        """Sessions are numbered from 1; 0 is nobody's."""
        if self.session < 1:
            raise self.fail("session", "at least 1", self.session)

    def seconds(self, field: str, value: float) -> float:
        """Finite and not negative."""
        if not 0 <= value < math.inf:
            raise self.fail(field, "a finite number of seconds >= 0", value)
        return value

    def text(self, field: str, value: str, caps: Caps) -> str:
        if len(value) > caps.text:
            raise self.fail(field, f"of at most {caps.text} characters", f"{len(value)} characters")
        return value

    def within(self, field: str, value: float, low: float, high: float) -> Any:
        if not low <= value <= high:
            raise self.fail(field, f"from {low} to {high}", value)
        return value

    def tokens(self, values: Any, caps: Caps) -> np.ndarray:
        """i32[n], each a token of the vocabulary. Errors do not tell the tokens, which are somebody's text."""
        count = len(values)
        if count > caps.tokens:
            raise self.fail("tokens", f"at most {caps.tokens} tokens", count)
        said = values[:]
        if count and not (min(said) >= 0 and max(said) < caps.vocabulary):
            raise self.fail("tokens", f"ids from 0 to {caps.vocabulary - 1}", "others")
        return np.fromiter(said, np.int32, count)
