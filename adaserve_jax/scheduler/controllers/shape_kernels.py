"""Loops over shapes, token edges and rows, compiled by numba: expected tokens, and rows that nodes keep on pace.

A file apart: `shapes.py` imports it with the first controller, so that other commands start without numba.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from adaserve_jax.compiled import compiled


@compiled
def gain(tokens: Any, nodes: Any, found: Any) -> None:
    """Enter `shapes.gain` into found, f64[O, N]."""
    last = tokens.shape[1] - 1
    for at in range(len(nodes)):
        each = min(max(nodes[at], 0.0), float(last))
        whole = int(each)
        above = min(whole + 1, last)
        for line in range(len(tokens)):
            found[line, at] = tokens[line, whole] + (tokens[line, above] - tokens[line, whole]) * (each - whole)


@compiled
def _fewest(tokens: Any, gained: Any, most: Any) -> Any:
    """Return the fewest nodes of a line that bring `gained` tokens; most + 1 if `most` nodes do not."""
    if tokens[-1] < gained:
        return most + 1
    nodes = 0
    while nodes <= most and tokens[nodes] < gained:
        nodes += 1
    return nodes


@compiled
def count_on_pace(
    drafted: Any, plain: Any, step_s: Any, extra: Any, tokens: Any, grid: Any, drafted_text: Any, plain_text: Any,
    found: Any,
) -> None:  # fmt: skip
    """Add `shapes.rows_on_pace` to found, i64[O, E, F]."""
    has_text = len(drafted_text) + len(plain_text) > 0
    rows_by_cost = np.zeros(max(extra.max(), 0) + 1, np.int64)
    for shape in range(step_s.shape[0]):
        for edge in range(step_s.shape[1]):
            seconds, most = step_s[shape, edge], extra[edge].max()
            rows = 0
            for row in range(len(plain) + len(drafted)):
                at = row - len(plain)
                rate = plain[row] if at < 0 else drafted[at]
                gained = math.ceil(max(rate * (seconds * grid) - grid, 0.0)) / grid
                if gained == 0.0:
                    nodes = 0
                else:
                    nodes = most + 1 if at < 0 else _fewest(tokens[shape], gained, most)
                    if has_text:
                        nodes = min(nodes, _fewest(plain_text[row] if at < 0 else drafted_text[at], gained, most))
                if nodes <= most:
                    rows_by_cost[nodes] += 1
                    rows += 1
            spent = nodes = 0
            while rows > 0:
                for _ in range(rows_by_cost[nodes]):
                    spent += nodes
                    for share in range(extra.shape[1]):
                        found[shape, edge, share] += spent <= extra[edge, share]
                rows -= rows_by_cost[nodes]
                rows_by_cost[nodes] = 0
                nodes += 1
