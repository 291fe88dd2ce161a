"""AdaServe's algorithms as written, with Python loops and no arrays: the oracle of scheduler/selection.py.

A candidate set is a list per request of nodes (f, depth, parent), parent an index in the same list or -1 (the root).
"""

from __future__ import annotations

from itertools import combinations, product

Node = tuple[float, int, int]


def algorithm_2(requests: list[list[Node]], need: list[float], budget: int, n_max: int, order: list[int]):
    """Algorithm 2 of spec/adaserve.md, line by line. Returns the set of node indices chosen for each request."""
    count = len(requests)
    assert budget >= count
    left = budget - count
    acc = [1.0] * count
    chosen: list[set[int]] = [set() for _ in requests]

    def best(i):
        open_nodes = [v for v in range(len(requests[i])) if v not in chosen[i] and requests[i][v][0] > 0]
        return min(open_nodes, key=lambda v: (-requests[i][v][0], requests[i][v][1], v), default=None)

    for i in order:
        while acc[i] < need[i] and (not n_max or len(chosen[i]) < n_max) and left > 0 and best(i) is not None:
            v = best(i)
            chosen[i].add(v)
            acc[i] += requests[i][v][0]
            left -= 1
    while left > 0:
        heads = [(i, best(i)) for i in range(count) if best(i) is not None]
        if not heads:
            break
        i, v = min(heads, key=lambda iv: (-requests[iv[0]][iv[1]][0], requests[iv[0]][iv[1]][1], iv[0], iv[1]))
        chosen[i].add(v)
        left -= 1
    return chosen


def all_trees(nodes: list[Node]):
    """Every connected node set that hangs from the root."""
    for size in range(len(nodes) + 1):
        for subset in combinations(range(len(nodes)), size):
            members = set(subset)
            if all(nodes[v][2] < 0 or nodes[v][2] in members for v in members):
                yield members


def tree_value(nodes: list[Node], tree: set[int]) -> float:
    return 1.0 + sum(nodes[v][0] for v in tree)


def algorithm_1(requests: list[list[Node]], need: list[float], budget: int):
    """The optimum by enumeration: most expected tokens with every need met, or None when that is impossible."""
    best = None
    for trees in product(*[list(all_trees(nodes)) for nodes in requests]):
        if len(requests) + sum(map(len, trees)) > budget:
            continue
        values = [tree_value(nodes, tree) for nodes, tree in zip(requests, trees, strict=True)]
        if all(value >= wanted for value, wanted in zip(values, need, strict=True)):
            best = max(sum(values), best or 0.0)
    return best


def most_met(requests: list[list[Node]], need: list[float], budget: int) -> int:
    """How many requests can have their need met at once, by enumeration."""
    best = 0
    for trees in product(*[list(all_trees(nodes)) for nodes in requests]):
        if len(requests) + sum(map(len, trees)) <= budget:
            pairs = zip(requests, trees, need, strict=True)
            best = max(best, sum(tree_value(nodes, tree) >= wanted for nodes, tree, wanted in pairs))
    return best


def is_connected(trees) -> bool:
    """Whether a packed DraftTrees has each root first, parents before children, same row, depth one more."""
    for node in range(len(trees.row)):
        parent = trees.parent[node]
        if trees.candidate[node] < 0:
            fine = parent == -1 and trees.depth[node] == 0
        else:
            fine = 0 <= parent < node and trees.row[parent] == trees.row[node]
            fine = fine and trees.depth[node] == trees.depth[parent] + 1
        if not fine:
            return False
    return sorted(trees.row.tolist()) == trees.row.tolist()
