"""An EAGLE-3 head in NumPy float64 from a folder in its published format. Shares no code with the package."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file


class Attention:
    """Grouped-query attention with rotary embedding over the entries that were fed so far. `keys` and `values`: of
    each."""

    def __init__(self, config: dict[str, Any]):
        self._config = config
        self.keys: list[np.ndarray] = []
        self.values: list[np.ndarray] = []

    def mix(self, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
        """Feed one entry, f[heads * dim] each, and return what its heads find, f[heads * dim]."""
        heads, kv = self._config["num_attention_heads"], self._config["num_key_value_heads"]
        dim, theta = self._config["head_dim"], self._config["rope_theta"]
        q, k, v = (each.reshape(-1, dim) for each in (q, k, v))
        position = len(self.keys)
        self.keys.append(_turned(k, position, theta))
        self.values.append(v)
        q, mixed = _turned(q, position, theta), np.empty((heads, dim))
        for head in range(heads):
            shared = head * kv // heads
            scores = np.array([key[shared] @ q[head] for key in self.keys]) / np.sqrt(dim)
            share = np.exp(scores - scores.max())
            mixed[head] = share / share.sum() @ np.array([value[shared] for value in self.values])
        return mixed.reshape(-1)

    def forget(self, count: int) -> None:
        """Keep the first entries only."""
        del self.keys[count:], self.values[count:]


class Head:
    """A head that drafts after a text: fed with the target's features first, then with its own."""

    def __init__(self, folder: Path, embedding: np.ndarray | None = None):
        """Read a folder. embedding: the target's, f[V, d], for a head that has none."""
        self.config = json.loads((folder / "config.json").read_text())
        self.w = {
            name: tensor if tensor.dtype.kind in "ib" else tensor.astype(np.float64)
            for path in sorted(folder.glob("*.safetensors"))
            for name, tensor in load_file(path).items()
        }
        self.embedding = self.w["embed_tokens.weight"] if embedding is None else embedding.astype(np.float64)
        self.attention = Attention(self.config)

    def read_target(self, tokens: list[int], features: np.ndarray) -> np.ndarray:
        """Feed tokens 1..n of a text with the target's features f[n, F] at 0..n-1. Returns the last entry's feature."""
        reduced = features.astype(np.float64) @ self.w["fc.weight"].T
        out = np.zeros(0)
        for token, feature in zip(tokens, reduced, strict=True):
            out = self.step(token, feature)
        return out

    def step(self, token: int, feature: np.ndarray) -> np.ndarray:
        """Feed one token with the feature before it, f[d]; attend to all that was fed. Returns the next feature."""
        eps = self.config["rms_norm_eps"]

        def weight(name: str) -> np.ndarray:
            return self.w[f"midlayer.{name}.weight"]

        both = np.concatenate([
            norm(self.embedding[token], weight("input_layernorm"), eps), norm(feature, weight("hidden_norm"), eps)
        ])  # fmt: skip
        mixed = self.attention.mix(*(weight(f"self_attn.{each}_proj") @ both for each in "qkv"))
        x = feature + weight("self_attn.o_proj") @ mixed
        h = norm(x, weight("post_attention_layernorm"), eps)
        gate = weight("mlp.gate_proj") @ h
        return x + weight("mlp.down_proj") @ (gate / (1 + np.exp(-gate)) * (weight("mlp.up_proj") @ h))

    def logits(self, feature: np.ndarray) -> np.ndarray:
        """Return the scores of the target's tokens, f64[V], -inf where the head has no row."""
        own = self.w["lm_head.weight"] @ norm(feature, self.w["norm.weight"], self.config["rms_norm_eps"])
        found = np.full(self.config["vocab_size"], -np.inf)
        for row, score in enumerate(own):
            found[row + self.w["d2t"][row]] = score
        return found


def norm(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    """Return the RMS norm of f[..., d]."""
    return x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + eps) * weight


def _turned(x: np.ndarray, position: int, theta: float) -> np.ndarray:
    half = x.shape[1] // 2
    angle = position * theta ** (-np.arange(half) / half)
    first, second = x[:, :half], x[:, half:]
    return np.concatenate(
        [first * np.cos(angle) - second * np.sin(angle), second * np.cos(angle) + first * np.sin(angle)], axis=1
    )
