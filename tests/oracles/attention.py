"""Float64 attention of packed tree tokens over paged context, request by request. Shares no code with the package."""

from __future__ import annotations

import numpy as np


def oracle_attention(
    q, k, v, k_pool, v_pool, layer, page_table, ctx_len, row, parent, window=None, only=None,
    softcap=None, sinks=None,
):  # fmt: skip
    """q: [H, D, T]; k, v: [K, D, T]; pools: [L, P, K, S, D], D may be padded. window: a token sees the last `window` of
    its keys only. softcap: bound of the scores. sinks: f[H], scores of keys without a value. only: tokens to
    compute, None: all; others are zero. Returns f64[H, D, T]; tokens with row >= R are zero."""
    heads, head_dim, tokens = q.shape
    kv_heads, page_size = k.shape[0], k_pool.shape[3]
    out = np.zeros(q.shape)
    for index, context in enumerate(ctx_len):
        pages = page_table[index, : -(-context // page_size)]
        committed = [
            np.concatenate([pool[layer, page] for page in pages], axis=1)[:, :context, :head_dim].astype(np.float64)
            if context
            else np.zeros((kv_heads, 0, head_dim))
            for pool in (k_pool, v_pool)
        ]
        for token in range(tokens) if only is None else only:
            if row[token] != index:
                continue
            chain = [token]
            while parent[chain[-1]] >= 0:
                chain.append(parent[chain[-1]])
            chain.reverse()
            keys, values = (
                np.concatenate([old, new[:, :, chain].astype(np.float64).transpose(0, 2, 1)], axis=1)
                for old, new in zip(committed, (k, v), strict=True)
            )
            if window is not None:
                keys, values = keys[:, -window:], values[:, -window:]
            for head in range(heads):
                kv = head * kv_heads // heads
                scores = keys[kv] @ q[head, :, token].astype(np.float64) / np.sqrt(head_dim)
                if softcap is not None:
                    scores = softcap * np.tanh(scores / softcap)
                if sinks is not None:
                    scores = np.append(scores, np.float64(sinks[head]))
                weights = np.exp(scores - scores.max())
                out[head, :, token] = weights[: len(values[kv])] @ values[kv] / weights.sum()
    return out
