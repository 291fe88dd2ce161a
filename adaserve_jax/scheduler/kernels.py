"""Loops of a decision over shapes, token edges and rows, compiled by numba: expected tokens, rows on pace, and values.

A file apart: `shapes.py` imports it for policies that need it, so that everything else starts without numba.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from adaserve_jax.compiled import compiled


@compiled
def _between(line: Any, nodes: Any) -> Any:
    """Return the expected tokens of `nodes` nodes of a line, linear between whole ones."""
    last = len(line) - 1
    each = min(max(nodes, 0.0), float(last))
    whole = int(each)
    above = min(whole + 1, last)
    return line[whole] + (line[above] - line[whole]) * (each - whole)


@compiled
def gain(tokens: Any, nodes: Any, found: Any) -> None:
    """Enter `shapes.gain` into found, f64[O, N]."""
    for line in range(len(tokens)):
        for at in range(len(nodes)):
            found[line, at] = _between(tokens[line], nodes[at])


@compiled
def _fill_fewest(line: Any, grid: Any, fewest: Any) -> Any:
    """Enter into fewest, i64[G], the nodes of a line that bring 0, 1, ... parts of a token, of which `grid` make one.

    Returns how many parts all nodes of the line bring, 0 counted.
    """
    parts = nodes = 0
    while parts / grid <= line[-1]:
        while line[nodes] < parts / grid:
            nodes += 1
        fewest[parts] = nodes
        parts += 1
    return parts


@compiled
def _fewest(line: Any, gained: Any, most: Any) -> Any:
    """Return the fewest nodes of a line that bring `gained` tokens; most + 1 if `most` nodes do not."""
    if line[-1] < gained:
        return most + 1
    nodes = 0
    while nodes <= most and line[nodes] < gained:
        nodes += 1
    return nodes


@compiled
def _parts(rate: Any, seconds: Any, grid: Any) -> Any:
    """Return the parts of a token, rounded up, that a row must gain beside its root in a step of so many seconds."""
    return np.ceil(max(rate * (seconds * grid) - grid, 0.0))


@compiled
def _fitting(rows_by_cost: Any, rows: Any, room: Any) -> Any:
    """Return how many rows fit into a room of nodes, those that need the fewest first.

    rows_by_cost: i64[nodes], rows that need 0, 1, ... nodes, `rows` in all.
    """
    found = nodes = 0
    while rows > 0 and room >= 0:
        alike = rows_by_cost[nodes]
        if alike:
            found += min(alike, room // nodes) if nodes else alike
            room -= alike * nodes
            rows -= alike
        nodes += 1
    return found


@compiled
def all_on_pace(rates: Any, step_s: Any, extra: Any, tokens: Any, grid: Any) -> Any:
    """Return `shapes.all_on_pace`."""
    fewest = np.zeros(int(tokens[:, -1].max() * grid) + 2, np.int64)
    for shape in range(step_s.shape[0]):
        reach = _fill_fewest(tokens[shape], grid, fewest)
        for edge in range(step_s.shape[1]):
            left = extra[edge]
            for row in range(len(rates)):
                parts = _parts(rates[row], step_s[shape, edge], grid)
                left = left - fewest[int(parts)] if parts < reach else -1
                if left < 0:
                    break
            if left >= 0:
                return True
    return False


@compiled
def value_options(
    drafted: Any, plain: Any, step_s: Any, extra: Any, tokens: Any, grid: Any, drafted_text: Any, plain_text: Any,
    gained: Any, chunk: Any, prompt_rates: Any, root_tokens: Any, emit: Any, prefill: Any, baseline_s: Any, value: Any,
    on_pace: Any,
) -> None:  # fmt: skip
    """Enter `shapes.value_options` into value, f64[O, E, F], and on_pace, i64[O, E, F]."""
    has_text = len(drafted_text) + len(plain_text) > 0
    fewest = np.zeros(int(tokens[:, -1].max() * grid) + 2, np.int64)
    rows_by_cost = np.zeros(max(extra.max(), 0) + 1, np.int64)
    for shape in range(step_s.shape[0]):
        reach = _fill_fewest(tokens[shape], grid, fewest)
        for edge in range(step_s.shape[1]):
            seconds, most = step_s[shape, edge], extra[edge].max()
            rows = 0
            for row in range(len(plain) + len(drafted)):
                at = row - len(plain)
                parts = _parts(plain[row] if at < 0 else drafted[at], seconds, grid)
                nodes = 0
                if parts > 0.0:
                    nodes = fewest[int(parts)] if at >= 0 and parts < reach else most + 1
                    if has_text:
                        nodes = min(nodes, _fewest(plain_text[row] if at < 0 else drafted_text[at], parts / grid, most))
                if nodes <= most:
                    rows_by_cost[nodes] += 1
                    rows += 1
            for share in range(extra.shape[1]):
                on_pace[shape, edge, share] = _fitting(rows_by_cost, rows, extra[edge, share])
                if extra[edge, share] < 0:
                    value[shape, edge, share] = -math.inf
                    continue
                prompts = chunk[edge, share]
                emitted = root_tokens + gained[shape, edge, share]
                rate = (emit * emitted + prefill * prompts) * (baseline_s / seconds)
                in_time = np.searchsorted(prompt_rates, prompts / seconds, "right")
                value[shape, edge, share] = on_pace[shape, edge, share] + (rate + in_time)
            rows_by_cost[: max(most, 0) + 1] = 0


@compiled
def value_budgets(
    f: Any, rates: Any, step_s: Any, budget: Any, depth: Any, best_first: Any, emit: Any, prefill: Any, baseline_s: Any,
    value: Any,
) -> None:  # fmt: skip
    """Enter into value, f64[E], what each budget is worth: rows on pace, and tokens per baseline latency.

    Arguments as in `objective.choose_budget`, of each budget its seconds. best_first: f64[1 + R C], sums of the largest
    f. prefill: prompt tokens by their weight.
    """
    rows, columns = f.shape
    rows_by_cost = np.zeros(columns + 1, np.int64)
    for edge in range(len(budget)):
        rows_by_cost[:] = 0
        reachable = 0
        for row in range(rows):
            if rates[row] == math.inf:
                continue
            need, reached, total = min(rates[row] * step_s[edge], depth + 1.0), 1.0, 0.0
            nodes = 0
            while reached < need and nodes < columns and f[row, nodes] > 0.0:
                total += f[row, nodes]
                reached = total + 1.0
                nodes += 1
            if reached >= need:
                rows_by_cost[nodes] += 1
                reachable += 1
        room = budget[edge] - rows
        emitted = rows + best_first[min(room, len(best_first) - 1)]
        rate = (emit * emitted + prefill) * baseline_s / step_s[edge]
        value[edge] = _fitting(rows_by_cost, reachable, room) + rate
