"""Float64 attention of packed tree tokens over paged context, one token at a time. Shares no code with the package."""

from __future__ import annotations

import numpy as np


def oracle_attention(q, k, v, k_pool, v_pool, layer, page_table, ctx_len, row, parent, window=None):
    """q: [H, D, T]; k, v: [K, D, T]; pools: [L, P, K, S, D]. Returns f64[H, D, T]; tokens with row >= R are zero.
    window: a token sees the last `window` of its keys only."""
    heads, head_dim, tokens = q.shape
    group = heads // k.shape[0]
    page_size = k_pool.shape[3]
    out = np.zeros(q.shape)
    for token in range(tokens):
        if row[token] >= len(ctx_len):
            continue
        chain = [token]
        while parent[chain[-1]] >= 0:
            chain.append(parent[chain[-1]])
        for head in range(heads):
            kv = head // group
            keys, values = [], []
            for position in range(ctx_len[row[token]]):
                page = page_table[row[token], position // page_size]
                keys.append(k_pool[layer, page, kv, position % page_size])
                values.append(v_pool[layer, page, kv, position % page_size])
            for node in reversed(chain):
                keys.append(k[kv, :, node])
                values.append(v[kv, :, node])
            if window is not None:
                keys, values = keys[-window:], values[-window:]
            scores = np.asarray(keys, np.float64) @ q[head, :, token].astype(np.float64) / np.sqrt(head_dim)
            weights = np.exp(scores - scores.max())
            out[head, :, token] = weights @ np.asarray(values, np.float64) / weights.sum()
    return out
