"""The whole Llama, Mixtral or MiMo model in NumPy float64, token by token features, from a checkpoint folder. Shares no
code with the package: it reads config.json and the safetensors itself, and attends densely through a boolean mask."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from safetensors import safe_open


def oracle_logits(
    folder: str | Path,
    tokens: np.ndarray | list[int],
    positions: np.ndarray | None = None,
    mask: np.ndarray | None = None,
    streams: list[np.ndarray] | None = None,
) -> np.ndarray:
    """Logits f64[T, V] of every token.

    tokens: int[T]. positions: int[T], 0..T-1 when None. mask: bool[T, T], mask[i, j] true when token i attends to
    token j (itself included); causal when None. A tree is its ancestor mask with positions = depth. streams: gets the
    stream behind every layer, f64[T, d].
    """
    folder = Path(folder)
    config = json.loads((folder / "config.json").read_text())
    w = _read(folder)
    tokens = np.asarray(tokens)
    count = len(tokens)
    positions = np.arange(count) if positions is None else np.asarray(positions)
    mask = np.tril(np.ones((count, count), bool)) if mask is None else mask
    heads = config["num_attention_heads"]
    kv_heads = config.get("num_key_value_heads", heads)
    dim = config.get("head_dim") or config["hidden_size"] // heads
    eps = config["rms_norm_eps"]
    theta = (config.get("rope_parameters") or config).get("rope_theta", 10000.0)

    x = w["model.embed_tokens.weight"][tokens]
    for layer in range(config["num_hidden_layers"]):
        p = f"model.layers.{layer}."
        h = _norm(x, w[p + "input_layernorm.weight"], eps)
        q, k, v = (
            (h @ w[f"{p}self_attn.{each}_proj.weight"].T + w.get(f"{p}self_attn.{each}_proj.bias", 0.0))
            .reshape(count, -1, dim) for each in "qkv"
        )  # fmt: skip
        q, k = _rope(q, positions, theta), _rope(k, positions, theta)
        mixed = np.empty((count, heads, dim))
        for head in range(heads):
            shared = head // (heads // kv_heads)
            scores = q[:, head] @ k[:, shared].T / np.sqrt(dim)
            scores = np.where(mask, scores, -np.inf)
            weight = np.exp(scores - scores.max(axis=1, keepdims=True))
            mixed[:, head] = weight / weight.sum(axis=1, keepdims=True) @ v[:, shared]
        x = x + mixed.reshape(count, heads * dim) @ w[p + "self_attn.o_proj.weight"].T
        h = _norm(x, w[p + "post_attention_layernorm.weight"], eps)
        if "num_local_experts" in config:
            x = x + _mixture(h, w, p + "block_sparse_moe.", config["num_experts_per_tok"])
        else:
            x = x + _mlp(h, *(w[f"{p}mlp.{name}_proj.weight"] for name in ("gate", "up", "down")))
        if streams is not None:
            streams.append(x)
    x = _norm(x, w["model.norm.weight"], eps)
    head = "model.embed_tokens.weight" if config.get("tie_word_embeddings", False) else "lm_head.weight"
    return x @ w[head].T


def _read(folder: Path) -> dict[str, np.ndarray]:
    weights: dict[str, np.ndarray] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="numpy") as file:
            weights |= {name: file.get_tensor(name).astype(np.float64) for name in file.keys()}  # noqa: SIM118
    return weights


def _mlp(h: np.ndarray, gate: np.ndarray, up: np.ndarray, down: np.ndarray) -> np.ndarray:
    inner = h @ gate.T
    return (inner / (1 + np.exp(-inner)) * (h @ up.T)) @ down.T


def _mixture(h: np.ndarray, w: dict[str, np.ndarray], block: str, per_token: int) -> np.ndarray:
    """Each token through its likeliest experts, one token and expert after another, as Mixtral weights them."""
    result = np.zeros_like(h)
    for token, row in enumerate(h):
        scores = np.exp(w[block + "gate.weight"] @ row)
        chosen = sorted(range(len(scores)), key=lambda expert: -scores[expert])[:per_token]
        for expert in chosen:
            matrices = (w[f"{block}experts.{expert}.{name}.weight"] for name in ("w1", "w3", "w2"))
            result[token] += scores[expert] / scores[chosen].sum() * _mlp(row, *matrices)
    return result


def _norm(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    return x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + eps) * weight


def _rope(x: np.ndarray, positions: np.ndarray, theta: float) -> np.ndarray:
    """Multiply the complex numbers x[i] + 1j * x[i + D/2] by exp(1j * position * theta^(-2i/D)). x: [T, heads, D].

    The angles are f32 numbers, as in transformers: that rounding is part of what a checkpoint was trained with.
    """
    half = x.shape[-1] // 2
    frequency = 1 / np.array([theta ** float(np.float32(i / half)) for i in range(half)], np.float32)
    turn = np.exp(1j * (positions.astype(np.float32)[:, None] * frequency).astype(np.float64))
    turned = (x[..., :half] + 1j * x[..., half:]) * turn[:, None, :]
    return np.concatenate([turned.real, turned.imag], axis=-1)
