"""The declared shapes of a step: packed tokens x rows. Everything that compiles is enumerated here.

Imports no jax.
"""

from __future__ import annotations

from dataclasses import dataclass

from adaserve_jax.errors import ConfigError

MAX_BLOCK = 16


@dataclass(frozen=True, order=True)
class Bucket:
    """One compiled shape. tokens: packed length T; rows: R; sampled: positions whose logits are computed."""

    tokens: int
    rows: int
    sampled: int

    @property
    def block_size(self) -> int:
        """Query tokens per block: about the mean per row, so that few queries of a block are empty."""
        mean = max(1, self.tokens // self.rows)
        return min(MAX_BLOCK, 1 << (mean.bit_length() - 1))

    @property
    def num_blocks(self) -> int:
        """Blocks that any split of the tokens over the rows needs at most."""
        rows = min(self.rows, self.tokens)
        return rows + (self.tokens - rows) // self.block_size


@dataclass(frozen=True)
class BucketSet:
    """All (tokens, rows) pairs of one program. Edges increase. max_sampled caps the positions whose logits are
    computed; None: one per row."""

    token_edges: tuple[int, ...]
    row_edges: tuple[int, ...]
    max_sampled: int | None

    def __post_init__(self) -> None:
        for name, edges in (("token_edges", self.token_edges), ("row_edges", self.row_edges)):
            if not edges or list(edges) != sorted(set(edges)) or edges[0] < 1:
                raise ConfigError(f"{name} must be increasing integers >= 1, got {edges}")

    def pick(self, tokens: int, rows: int) -> Bucket:
        """The smallest bucket that holds both. Raises ValueError when none does."""
        row_edge = _round_up(rows, self.row_edges)
        for tokens_edge in self.token_edges:
            if tokens_edge >= tokens and row_edge in self._rows_of(tokens_edge):
                return self._bucket(tokens_edge, row_edge)
        raise ValueError(f"no bucket holds {tokens} tokens in {rows} rows (edges {self.token_edges}, {self.row_edges})")

    def all(self) -> list[Bucket]:
        return [self._bucket(tokens, rows) for tokens in self.token_edges for rows in self._rows_of(tokens)]

    def _bucket(self, tokens: int, rows: int) -> Bucket:
        return Bucket(tokens, rows, rows if self.max_sampled is None else min(tokens, self.max_sampled))

    def _rows_of(self, tokens: int) -> tuple[int, ...]:
        """Row edges that a step of this many tokens can need: every row has at least one token."""
        needed = [edge for edge in self.row_edges if edge <= tokens]
        above = [edge for edge in self.row_edges if edge > tokens][:1]
        covered = needed and needed[-1] == tokens
        return tuple(needed if covered else needed + above)


def _round_up(value: int, edges: tuple[int, ...]) -> int:
    for edge in edges:
        if value <= edge:
            return edge
    raise ValueError(f"{value} is above the largest edge {edges[-1]}")
