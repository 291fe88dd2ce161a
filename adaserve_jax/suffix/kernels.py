"""Loops of the suffix source, compiled by numba: index texts, find earlier occurrences, grow trees of what followed.

An occurrence is a position whose preceding tokens are also the last tokens of a row. Hash chains find them, as match
finders of LZ compressors do: for each context length k, `head` holds the newest position after each hash of k tokens,
and `prev` the position before it in the same chain. Positions count tokens since a store began and are stored modulo
its capacity, so that new texts overwrite the oldest ones without a search.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from adaserve_jax.compiled import compiled

CONTEXTS = (2, 4, 8)
"""Lengths of the hashed contexts, in tokens."""
MOST_MATCHED = 32
"""Tokens up to which the length of a match is counted."""
MOST_OCCURRENCES = 16
"""Occurrences in one store that vote for what follows: first those found by the longest hashed context, of these the
newest."""
MOST_VISITED = 24
"""Links of one hash chain that are followed."""
ENOUGH = 8
"""Occurrences of a longer context for which no shorter one is looked up."""
MOST_NODES = 192
"""Nodes of a row's tree before the best ones of each level are kept."""
MATCH_BINS = (3, 4, 6, 9, 13, 21, 33)
"""Lower ends of the bins of the match's length plus the nodes above; the first bin holds 2."""
NOISE_BINS = (-2.0, -1.0, 0.0, 1.0, 2.0, 3.0, 4.5)
"""Lower ends of the bins of perturbed log-odds."""
DEPTH_CLASSES, KINDS, BINS = 3, 10, 8
"""Axes of the table of chances: depth 1, 2 to 4, deeper; kind of node; bin."""
LEAST_F = 0.02
"""Probability below which a node is not proposed."""


@compiled
def _mix(value: Any) -> Any:
    value = (value ^ (value >> np.uint64(33))) * np.uint64(0xFF51AFD7ED558CCD)
    return value ^ (value >> np.uint64(29))


@compiled
def _context_hash(tokens: Any, mask: Any, end: Any, length: Any, salt: Any) -> Any:
    """Return the hash of the `length` tokens before position `end`."""
    value = np.uint64(salt) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(length)
    for position in range(end - length, end):
        value = _mix(value ^ np.uint64(tokens[position & mask])) + np.uint64(0x9E3779B97F4A7C15)
    return value


@compiled
def index_tokens(
    tokens: Any, mask: Any, head: Any, prev: Any, text_start: Any, start: Any, end: Any, salt: Any
) -> None:
    """Enter the contexts that end at positions start + 1 to end, of a text that begins at text_start.

    tokens: i32[capacity]; mask: capacity - 1, or -1 where positions never wrap. head: i64[K, H], H a power of two;
    prev: i64[K, capacity].
    """
    heads = np.uint64(head.shape[1] - 1)
    for position in range(start + 1, end + 1):
        for which, length in enumerate(CONTEXTS):
            if position - text_start >= length:
                slot = np.int64(_context_hash(tokens, mask, position, length, salt) & heads)
                prev[which, position & mask] = head[which, slot]
                head[which, slot] = position


@compiled
def _matched(query: Any, query_end: Any, tokens: Any, mask: Any, position: Any, oldest: Any) -> Any:
    """Return how many of the last query tokens stand before `position` too, at most MOST_MATCHED."""
    length = 0
    most = min(MOST_MATCHED, query_end, position - oldest)
    while length < most and query[query_end - 1 - length] == tokens[(position - 1 - length) & mask]:
        length += 1
    return length


@compiled
def _occurrences(
    query: Any, query_end: Any, tokens: Any, mask: Any, head: Any, prev: Any, oldest: Any, newest: Any, salts: Any,
    salt: Any, found: Any, lengths: Any,
) -> Any:  # fmt: skip
    """Collect positions before which the end of `query` stands, behind oldest and before newest; return how many.

    salts: i32[capacity], of each position; found, lengths: i64[MOST_OCCURRENCES], filled.
    """
    count = 0
    heads = np.uint64(head.shape[1] - 1)
    for which in range(len(CONTEXTS) - 1, -1, -1):
        length = CONTEXTS[which]
        if query_end < length or count >= ENOUGH:
            continue
        slot = np.int64(_context_hash(query, np.int64(-1), query_end, length, salt) & heads)
        position = head[which, slot]
        for _ in range(MOST_VISITED):
            if position <= oldest or count == MOST_OCCURRENCES:
                break
            if position < newest and (len(salts) == 0 or salts[(position - 1) & mask] == salt):
                matched = _matched(query, query_end, tokens, mask, position, oldest)
                known = matched < length
                for other in range(count):
                    known |= found[other] == position
                if not known:
                    found[count], lengths[count] = position, matched
                    count += 1
            following = prev[which, position & mask]
            if following >= position:  # overwritten by a newer text
                break
            position = following
    return count


@compiled
def gumbel(seed: Any, choice: Any, position: Any, token: Any) -> Any:
    """Return the noise of one token at one position: an entry of `tree.sampling.gumbel_noise`."""
    key = _threefry(np.uint32(seed & np.uint64(0xFFFFFFFF)), np.uint32(seed >> np.uint64(32)), np.uint32(choice),
                    np.uint32(position))  # fmt: skip
    even, odd = _threefry(key[0], key[1], np.uint32(0), np.uint32(token // 2))
    bits = odd if token % 2 else even
    uniform = (np.float64(bits >> np.uint32(9)) + 0.5) * 2.0**-23
    return -math.log(-math.log(uniform))


@compiled
def _threefry(key0: Any, key1: Any, high: Any, low: Any) -> Any:
    """Apply Threefry-2x32 with 20 rounds (Salmon et al., Random123)."""
    key2 = np.uint32(key0 ^ key1 ^ np.uint32(0x1BD11BDA))
    keys = (key0, key1, key2)
    x0, x1 = np.uint32(high + key0), np.uint32(low + key1)
    for group in range(5):
        for rotation in (13, 15, 26, 6) if group % 2 == 0 else (17, 29, 16, 24):
            x0 = np.uint32(x0 + x1)
            x1 = np.uint32((x1 << np.uint32(rotation)) | (x1 >> np.uint32(32 - rotation)))
            x1 = np.uint32(x1 ^ x0)
        x0 = np.uint32(x0 + keys[(group + 1) % 3])
        x1 = np.uint32(x1 + keys[(group + 2) % 3] + np.uint32(group + 1))
    return x0, x1


@compiled
def _add_continuation(
    tokens: Any, mask: Any, position: Any, newest: Any, wraps_into: Any, most: Any, weight: Any, matched: Any,
    kind: Any, node: Any, node_weight: Any, count: Any,
) -> Any:  # fmt: skip
    """Add what followed an occurrence to the tree; return the number of its nodes.

    node: i32[MOST_NODES, 5]: token, parent, first child, next sibling, kind | longest match << 1, where kind is 0 for
    the row's own text. A continuation that reaches `newest` goes on with itself if wraps_into (a text that repeats with
    a period), else it ends; -1 ends it too.
    """
    at = -1
    path = np.empty(most, np.int32)
    for depth in range(most):
        where = position + depth
        if where < newest:
            token = tokens[where & mask]
        elif wraps_into:
            token = path[where - newest]
        else:
            break
        if token < 0:
            break
        path[depth] = token
        child = node[0, 2] if at < 0 else node[at, 2]
        while child > 0 and node[child, 0] != token:
            child = node[child, 3]
        if child <= 0:
            if count == MOST_NODES:
                break
            child = count
            count += 1
            parent = 0 if at < 0 else at
            node[child, 0], node[child, 1], node[child, 2] = token, parent, 0
            node[child, 3], node[parent, 2] = node[parent, 2], child
            node[child, 4] = kind | (matched << 1)
            node_weight[child] = 0.0
        elif node[child, 4] >> 1 < matched:
            node[child, 4] = kind | (matched << 1)
        node_weight[child] += weight
        at = child
    return count


@compiled
def _bin_of(edges: Any, value: Any) -> Any:
    index = 0
    while index < len(edges) and value >= edges[index]:
        index += 1
    return index


@compiled
def propose_rows(
    tokens: Any, slots: Any, num_tokens: Any, most_depth: Any, seed: Any, choice: Any, temperature: Any,
    salt: Any, own_head: Any, own_prev: Any, indexed: Any, ring: Any, ring_salts: Any, ring_head: Any, ring_prev: Any,
    ring_oldest: Any, ring_newest: Any, chance: Any, prior: Any, widths: Any, token_out: Any, parent_out: Any,
    log_f_out: Any, cell_out: Any, log_q_out: Any,
) -> None:  # fmt: skip
    """Grow the candidate tree of each row from what followed earlier occurrences of its last tokens.

    tokens: i32[S, W], by slot. slots, num_tokens, most_depth: i64[R], seed: u64[R], choice: i32[R], temperature:
    f32[R], salt: i64[R], -1 for a row that reads no other text. own_head: i64[S, K, H]; own_prev: i64[S, K, W];
    indexed: i64[S], tokens of each slot whose contexts are entered. ring...: the store of ended texts, positions in
    (ring_oldest, ring_newest). chance, prior: f32[2, DEPTH_CLASSES, KINDS, BINS]. widths: i64[D], most nodes of each
    level. Outputs: [R, sum(widths)], level after level; parents are columns, -1 for the root.
    """
    found, lengths = np.empty(MOST_OCCURRENCES, np.int64), np.empty(MOST_OCCURRENCES, np.int64)
    node, node_weight = np.empty((MOST_NODES, 5), np.int32), np.empty(MOST_NODES)
    score, node_f, node_column = np.empty(MOST_NODES), np.empty(MOST_NODES), np.empty(MOST_NODES, np.int64)
    node_cell, node_share = np.empty(MOST_NODES, np.int64), np.empty(MOST_NODES)
    no_salts = np.empty(0, np.int32)
    for row in range(len(slots)):
        slot, end = slots[row], num_tokens[row]
        text = tokens[slot]
        whole = np.int64(-1)
        if indexed[slot] < end - 1:
            index_tokens(text, whole, own_head[slot], own_prev[slot], 0, indexed[slot], end - 1, 0)
            indexed[slot] = end - 1
        if most_depth[row] < 1:
            continue
        node[0, 2], count = 0, 1
        for source in range(2):
            if source == 0:
                number = _occurrences(
                    text, end, text, whole, own_head[slot], own_prev[slot], 0, end, no_salts, 0, found, lengths
                )
            elif salt[row] >= 0 and ring_newest > ring_oldest:
                number = _occurrences(
                    text, end, ring, np.int64(len(ring) - 1), ring_head, ring_prev, ring_oldest, ring_newest,
                    ring_salts, salt[row], found, lengths,
                )  # fmt: skip
            else:
                number = 0
            for occurrence in range(number):
                matched = lengths[occurrence]
                most = min(most_depth[row], len(widths), 4 + 2 * matched)
                weight = float(matched * matched)
                if source == 0:
                    count = _add_continuation(
                        text, whole, found[occurrence], end, True, most, weight, matched, 0, node, node_weight, count
                    )
                else:
                    count = _add_continuation(
                        ring, np.int64(len(ring) - 1), found[occurrence], ring_newest, False, most, weight, matched, 1,
                        node, node_weight, count,
                    )  # fmt: skip
        if count == 1:
            continue
        coupled = 1 if temperature[row] > 0 else 0
        node_f[0], node_column[0] = 1.0, -1
        # nodes of the level above that are kept, as indices into `node`
        above, num_above = np.zeros(1, np.int64), 1
        base = 0
        for level in range(len(widths)):
            kept, num_kept = np.empty(widths[level], np.int64), 0
            for index in range(num_above):
                parent = above[index]
                total, child = 0.0, node[parent, 2]
                while child > 0:
                    total += node_weight[child]
                    child = node[child, 3]
                child = node[parent, 2]
                while child > 0:
                    share = node_weight[child] / total
                    score[child] = math.log(share)
                    if coupled:
                        score[child] += gumbel(seed[row], choice[row], end + level, node[child, 0])
                    node_share[child] = share
                    child = node[child, 3]
                child = node[parent, 2]
                while child > 0:
                    rank, other = 0, node[parent, 2]
                    while other > 0:
                        if score[other] > score[child] or (score[other] == score[child] and other < child):
                            rank += 1
                        other = node[other, 3]
                    share = node_share[child]
                    kind = min(rank, 2) + 2 if rank else 0 if share >= 0.9 else 1 if share >= 0.6 else 2
                    kind += 5 * (node[child, 4] & 1)
                    depth = 0 if level == 0 else 1 if level < 4 else 2
                    bin_ = _bin_of(MATCH_BINS, (node[child, 4] >> 1) + level)
                    if coupled:
                        likely = min(max(prior[0, depth, kind, bin_], 1e-3), 1 - 1e-3)
                        noise = score[child] - math.log(share)
                        bin_ = _bin_of(NOISE_BINS, noise + math.log(likely / (1 - likely)))
                    node_cell[child] = (depth * KINDS + kind) * BINS + bin_
                    node_f[child] = node_f[parent] * chance[coupled, depth, kind, bin_]
                    if node_f[child] >= LEAST_F:
                        place = num_kept
                        if place == widths[level]:
                            place -= 1
                            if node_f[child] <= node_f[kept[place]]:
                                place = -1
                        else:
                            num_kept += 1
                        if place >= 0:
                            while place > 0 and node_f[kept[place - 1]] < node_f[child]:
                                kept[place] = kept[place - 1]
                                place -= 1
                            kept[place] = child
                    child = node[child, 3]
            for place in range(num_kept):
                child, column = kept[place], base + place
                node_column[child] = column
                token_out[row, column] = node[child, 0]
                parent_out[row, column] = node_column[node[child, 1]]
                log_f_out[row, column] = math.log(node_f[child])
                cell_out[row, column] = node_cell[child]
                log_q_out[row, column] = math.log(node_share[child])
            if num_kept == 0:
                break
            above, num_above = kept, num_kept
            base += widths[level]


@compiled
def merge_rows(
    drafted_token: Any, drafted_parent: Any, drafted_log_f: Any, drafted_depth: Any, proposed_token: Any,
    proposed_parent: Any, proposed_log_f: Any, token: Any, parent: Any, log_f: Any, proposed_column: Any,
) -> None:  # fmt: skip
    """Merge two candidate trees of each row; a token that both have under the same parent is one node.

    drafted...: [R, C], proposed...: [R, P], parents before children, -1 for the root, log f -inf for absent nodes.
    drafted_depth: i32[C]. Outputs: [R, C + P], the drafted columns first. Nodes of both get the larger chance, given
    their parent, and their descendants follow; proposed_column: the proposed one of each node, or -1.
    """
    rows, num_drafted = drafted_token.shape
    num_proposed = proposed_token.shape[1]
    place, chance = np.empty(num_proposed, np.int32), np.empty(num_drafted + num_proposed, np.float32)
    for row in range(rows):
        for column in range(num_drafted):
            above = drafted_parent[row, column]
            token[row, column], parent[row, column] = drafted_token[row, column], above
            chance[column] = drafted_log_f[row, column] - (drafted_log_f[row, above] if above >= 0 else 0.0)
        for column in range(num_proposed):
            place[column] = -1
            if proposed_log_f[row, column] == -np.inf:
                continue
            above = proposed_parent[row, column]
            own = proposed_log_f[row, column] - (proposed_log_f[row, above] if above >= 0 else 0.0)
            at = place[above] if above >= 0 else -1
            twin = -1
            if at < num_drafted:
                for other in range(num_drafted):
                    if (
                        drafted_parent[row, other] == at and drafted_token[row, other] == proposed_token[row, column]
                        and drafted_log_f[row, other] > -np.inf and (at >= 0 or drafted_depth[other] == 1)
                    ):  # fmt: skip
                        twin = other
                        break
            if twin < 0:
                twin = num_drafted + column
                token[row, twin], parent[row, twin], chance[twin] = proposed_token[row, column], at, own
            else:
                chance[twin] = max(chance[twin], own)
            place[column] = twin
            proposed_column[row, twin] = column
        for column in range(num_drafted + num_proposed):
            there = drafted_log_f[row, column] > -np.inf if column < num_drafted else proposed_column[row, column] >= 0
            if there:
                above = parent[row, column]
                log_f[row, column] = chance[column] + (log_f[row, above] if above >= 0 else 0.0)
