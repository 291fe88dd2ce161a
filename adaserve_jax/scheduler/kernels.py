"""Loops of a decision and of a selection, compiled by numba: expected tokens, rows on pace, values; ranks and trees.

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
def choose_budget(
    f: Any, ascending: Any, rates: Any, edges: Any, verify_s: Any, spent_s: Any, prefill_tokens: Any, cap: Any,
    depth: Any, emit: Any, prefill: Any, baseline_s: Any, need: Any,
) -> Any:  # fmt: skip
    """Enter A_cap of `objective.choose_budget` into need, f64[R], and return the budget.

    A budget is worth the rows that it keeps on pace, and tokens per baseline latency. ascending: f64[R C], f sorted.
    rates: `BudgetQuestion.need_rate`. prefill: prompt tokens by their weight.
    """
    rows, columns = f.shape
    nodes = np.count_nonzero(f)
    first = np.searchsorted(edges, rows + prefill_tokens)
    last = min(np.searchsorted(edges, min(rows + nodes, cap) + prefill_tokens), len(edges) - 1)
    rows_by_cost = np.zeros(columns + 1, np.int64)
    chosen, most, taken, gained = first, -math.inf, 0, 0.0
    for edge in range(first, last + 1):
        seconds = spent_s + verify_s[edge]
        rows_by_cost[:] = 0
        reachable = 0
        for row in range(rows):
            if rates[row] == math.inf:
                continue
            wanted, reached, total = min(rates[row] * seconds, depth + 1.0), 1.0, 0.0
            needed = 0
            while reached < wanted and needed < columns and f[row, needed] > 0.0:
                total += f[row, needed]
                reached = total + 1.0
                needed += 1
            if reached >= wanted:
                rows_by_cost[needed] += 1
                reachable += 1
        room = min(edges[edge] - prefill_tokens, cap) - rows
        while taken < min(room, len(ascending)):
            taken += 1
            gained += ascending[len(ascending) - taken]
        rate = (emit * (rows + gained) + prefill) * baseline_s / seconds
        value = _fitting(rows_by_cost, reachable, room) + rate
        if value > most:
            chosen, most = edge, value
    seconds = spent_s + verify_s[chosen]
    for row in range(rows):
        need[row] = 0.0 if rates[row] == math.inf else min(rates[row] * seconds, depth + 1.0)
    return min(edges[chosen] - prefill_tokens, cap)


@compiled
def cost(log_f: Any, parent: Any, found: Any) -> None:
    """Enter `selection._cost` into found, f32[R, C]."""
    for row in range(log_f.shape[0]):
        for node in range(log_f.shape[1]):
            chance, above = log_f[row, node], parent[row, node]
            own = np.float32(np.inf)
            if chance == chance:
                own = np.float32(0.0) - min(chance, np.float32(0.0))  # never -0.0
            found[row, node] = own if above < 0 else max(own, found[row, above])


@compiled
def rank(bits: Any, depth: Any, row_bits: Any, column_bits: Any, key: Any, ordered: Any, column: Any) -> None:
    """Enter the sorted keys of `selection.rank` into key, and in their order the costs and columns.

    bits: i32[R, C], of the costs. ordered: i32[R, C], likewise.
    """
    for row in range(key.shape[0]):
        for node in range(key.shape[1]):
            tie = (((np.int64(depth[node]) << row_bits) + row) << column_bits) + node
            key[row, node] = (np.int64(bits[row, node]) << 32) | tie
        key[row].sort()
        for at in range(key.shape[1]):
            ordered[row, at] = key[row, at] >> 32
            column[row, at] = key[row, at] & ((1 << column_bits) - 1)


@compiled
def slo_phase(f: Any, need: Any, order: Any, room: Any, most: Any, taken: Any) -> None:
    """Enter `selection.slo_phase` into taken, i64[R]. order: f64[R], the least first; empty for `cheapest-first`. room:
    nodes beside the roots. most: nodes of one row.
    """
    rows, columns = f.shape
    wanted, by = np.empty(rows, np.int64), np.empty(rows)
    for row in range(rows):
        total, nodes = 0.0, 0
        while nodes < columns and f[row, nodes] > 0.0 and total + 1.0 < need[row]:
            total += f[row, nodes]
            nodes += 1
        wanted[row] = min(nodes, most)
        if len(order):
            by[row] = order[row]
        else:
            by[row] = wanted[row] if total + 1.0 >= need[row] else wanted[row] + columns + 1.0
    for row in np.argsort(by, kind="mergesort"):
        taken[row] = min(wanted[row], max(room, 0))
        room -= wanted[row]


@compiled
def throughput_phase(key: Any, f: Any, taken: Any, left: Any, chosen: Any) -> None:
    """Enter `selection.throughput_phase` into chosen, bool[R, C]."""
    rows, columns = key.shape
    rest = np.empty(rows * columns, np.int64)
    others = 0
    for row in range(rows):
        for at in range(columns):
            chosen[row, at] = at < taken[row]
            if not chosen[row, at] and f[row, at] > 0.0:
                rest[others] = key[row, at]
                others += 1
    if left <= 0 or not others:
        return
    worst = np.partition(rest[:others], left - 1)[left - 1] if left < others else np.iinfo(np.int64).max
    for row in range(rows):
        for at in range(columns):
            chosen[row, at] |= f[row, at] > 0.0 and key[row, at] <= worst


@compiled
def pack(
    candidate_token: Any, candidate_parent: Any, candidate_depth: Any, root_token: Any, f: Any, column: Any, chosen: Any
) -> Any:  # fmt: skip
    """Return row, token, parent, depth, candidate and f of `DraftTrees`; f, column and chosen: [R, C], in one order."""
    rows, columns = chosen.shape
    nodes = rows + np.count_nonzero(chosen)
    row, token, parent = np.empty(nodes, np.int32), np.empty(nodes, np.int32), np.empty(nodes, np.int32)
    depth, candidate, packed_f = np.empty(nodes, np.int32), np.empty(nodes, np.int32), np.empty(nodes, np.float32)
    at_rank, place = np.empty(columns, np.int64), np.empty(columns, np.int64)
    end = 0
    for each in range(rows):
        root = end
        row[end], token[end], parent[end], depth[end] = each, root_token[each], -1, 0
        candidate[end], packed_f[end] = -1, 1.0
        end += 1
        at_rank[:] = -1
        for rank_ in range(columns):
            if chosen[each, rank_]:
                at_rank[column[each, rank_]] = rank_
        for node in range(columns):
            if at_rank[node] >= 0:
                above = candidate_parent[each, node]
                row[end], token[end], depth[end] = each, candidate_token[each, node], candidate_depth[node]
                parent[end] = root if above < 0 else place[above]
                candidate[end], packed_f[end] = node, f[each, at_rank[node]]
                place[node] = end
                end += 1
    return row, token, parent, depth, candidate, packed_f
