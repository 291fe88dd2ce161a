"""Losses of a tiny draft and their gradients in NumPy float64, by hand: one text at a time, no packing. Shares no code
with the package; the weights are those of its dict, by name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

Weights = dict[str, np.ndarray]


def distance(p: np.ndarray, q: np.ndarray, kind: str, beta: float) -> tuple[np.ndarray, np.ndarray]:
    """(distances f64[N], their derivatives by q f64[N, C]) of distributions p, q: f64[N, C] over categories."""
    if kind == "kl":
        return (p * np.log(p / q)).sum(1), -p / q
    if kind == "reverse_kl":
        return (q * np.log(q / p)).sum(1), np.log(q / p) + 1
    m = beta * p + (1 - beta) * q
    value = beta * p * np.log(p / m) + (1 - beta) * q * np.log(q / m)
    return value.sum(1), (1 - beta) * np.log(q / m)


def row_losses(
    logits: np.ndarray, ids: np.ndarray, log_p: np.ndarray, kind: str, beta: float, temperature: float
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(loss f64[N], overlap f64[N], derivative of each loss by its row's logits f64[N, V])."""
    scores = logits.astype(np.float64) / temperature
    every_q = np.exp(scores - scores.max(1, keepdims=True))
    every_q /= every_q.sum(1, keepdims=True)
    count, vocab = every_q.shape
    top = ids.shape[1]
    category = np.full((count, vocab), top)
    np.put_along_axis(category, ids, np.broadcast_to(np.arange(top), ids.shape), axis=1)
    q = np.stack([np.where(category == c, every_q, 0).sum(1) for c in range(top + (top < vocab))], axis=1)
    p = np.exp(log_p.astype(np.float64))
    if top < vocab:
        p = np.concatenate([p, 1 - p.sum(1, keepdims=True)], axis=1)
    loss, by_q = distance(p, q, kind, beta)
    by_every_q = np.take_along_axis(by_q, category, axis=1)
    by_logits = every_q * (by_every_q - (every_q * by_every_q).sum(1, keepdims=True)) / temperature
    return loss, np.minimum(p, q)[:, :top].sum(1), by_logits


@dataclass
class Draft:
    """A Llama model without biases, its weights in float64. config: a ModelConfig, of which only numbers are read."""

    config: Any
    weights: Weights

    def logits(self, tokens: np.ndarray) -> np.ndarray:
        """f64[T, V] of one text."""
        return self._forward(tokens)[0]

    def loss(self, texts: list[tuple], kind: str, beta: float, temperature: float) -> tuple[float, float]:
        """Sums of (loss, overlap) over all rows. texts: (tokens, position, ids, log_p) each."""
        sums = np.zeros(2)
        for tokens, position, ids, log_p in texts:
            loss, overlap, _ = row_losses(self.logits(tokens)[position], ids, log_p, kind, beta, temperature)
            sums += loss.sum(), overlap.sum()
        return float(sums[0]), float(sums[1])

    def gradient(self, texts: list[tuple], kind: str, beta: float, temperature: float) -> Weights:
        """Of the sum of losses by every weight."""
        total = {name: np.zeros_like(weight) for name, weight in self.weights.items()}
        for tokens, position, ids, log_p in texts:
            logits, kept = self._forward(tokens)
            by_logits = np.zeros_like(logits)
            by_logits[position] = row_losses(logits[position], ids, log_p, kind, beta, temperature)[2]
            self._backward(tokens, by_logits, kept, total)
        return total

    def _head(self) -> str:
        return "embed" if self.config.tie_embeddings else "head"

    def _forward(self, tokens: np.ndarray) -> tuple[np.ndarray, list[dict]]:
        c, w, count = self.config, self.weights, len(tokens)
        rope = _Rope(c.rope_theta, c.head_dim, count)
        x, kept = w["embed"][tokens], []
        for layer in range(c.num_layers):
            name = f"layers.{layer}."
            age = np.arange(count)[:, None] - np.arange(count)
            seen = (age >= 0) & (age < (c.window_of(layer) or count))
            a = _norm(x, w[name + "attn_norm"], c.rms_norm_eps)
            q, k, v = np.split(a @ w[name + "qkv"].T, [c.q_size, c.q_size + c.kv_size], axis=1)
            q, k = rope.turn(q.reshape(count, c.num_heads, -1)), rope.turn(k.reshape(count, c.num_kv_heads, -1))
            v = v.reshape(count, c.num_kv_heads, -1)
            shared = np.arange(c.num_heads) // (c.num_heads // c.num_kv_heads)
            scores = np.einsum("thd,shd->hts", q, k[:, shared]) / np.sqrt(c.head_dim)
            scores = np.where(seen, scores, -np.inf)
            weight = np.exp(scores - scores.max(2, keepdims=True))
            weight /= weight.sum(2, keepdims=True)
            mixed = np.einsum("hts,shd->thd", weight, v[:, shared]).reshape(count, -1)
            y = x + mixed @ w[name + "out"].T
            b = _norm(y, w[name + "mlp_norm"], c.rms_norm_eps)
            gate, up = np.split(b @ w[name + "gate_up"].T, 2, axis=1)
            gated = gate / (1 + np.exp(-gate)) * up
            kept.append({
                "x": x, "a": a, "q": q, "k": k, "v": v, "weight": weight, "mixed": mixed, "y": y, "b": b,
                "gate": gate, "up": up, "gated": gated, "shared": shared,
            })  # fmt: skip
            x = y + gated @ w[name + "down"].T
        kept.append({"x": x, "rope": rope})
        return _norm(x, w["norm"], c.rms_norm_eps) @ w[self._head()].T, kept

    def _backward(self, tokens: np.ndarray, by_logits: np.ndarray, kept: list[dict], total: Weights) -> None:
        c, w, count = self.config, self.weights, len(tokens)
        last, rope = kept[-1]["x"], kept[-1]["rope"]
        total[self._head()] += by_logits.T @ _norm(last, w["norm"], c.rms_norm_eps)
        by_x = _norm_back(by_logits @ w[self._head()], last, w["norm"], c.rms_norm_eps, total, "norm")
        for layer in reversed(range(c.num_layers)):
            name, s = f"layers.{layer}.", kept[layer]
            total[name + "down"] += by_x.T @ s["gated"]
            by_gated = by_x @ w[name + "down"]
            sigmoid = 1 / (1 + np.exp(-s["gate"]))
            by_gate = by_gated * s["up"] * (sigmoid + s["gate"] * sigmoid * (1 - sigmoid))
            by_both = np.concatenate([by_gate, by_gated * s["gate"] * sigmoid], axis=1)
            total[name + "gate_up"] += by_both.T @ s["b"]
            by_b = by_both @ w[name + "gate_up"]
            by_y = by_x + _norm_back(by_b, s["y"], w[name + "mlp_norm"], c.rms_norm_eps, total, name + "mlp_norm")
            total[name + "out"] += by_y.T @ s["mixed"]
            by_mixed = (by_y @ w[name + "out"]).reshape(count, c.num_heads, -1)
            by_weight = np.einsum("thd,shd->hts", by_mixed, s["v"][:, s["shared"]])
            by_scores = s["weight"] * (by_weight - (s["weight"] * by_weight).sum(2, keepdims=True))
            by_scores /= np.sqrt(c.head_dim)
            by_q = np.einsum("hts,shd->thd", by_scores, s["k"][:, s["shared"]])
            by_k, by_v = np.zeros_like(s["k"]), np.zeros_like(s["v"])
            for head, of in enumerate(s["shared"]):
                by_k[:, of] += by_scores[head].T @ s["q"][:, head]
                by_v[:, of] += s["weight"][head].T @ by_mixed[:, head]
            by_qkv = [rope.turn(by_q, back=True), rope.turn(by_k, back=True), by_v]
            flat = np.concatenate([each.reshape(count, -1) for each in by_qkv], axis=1)
            total[name + "qkv"] += flat.T @ s["a"]
            by_a = flat @ w[name + "qkv"]
            by_x = by_y + _norm_back(by_a, s["x"], w[name + "attn_norm"], c.rms_norm_eps, total, name + "attn_norm")
        np.add.at(total["embed"], tokens, by_x)


class _Rope:
    """Rotation of pairs (i, i + D/2) as complex numbers; angles are f32 numbers, as models are trained with them."""

    def __init__(self, theta: float, dim: int, count: int):
        half = dim // 2
        frequency = 1 / np.array([theta ** float(np.float32(i / half)) for i in range(half)], np.float32)
        angle = np.arange(count, dtype=np.float32)[:, None] * frequency
        self.turned = np.exp(1j * angle.astype(np.float64))[:, None, :]

    def turn(self, x: np.ndarray, *, back: bool = False) -> np.ndarray:
        half = x.shape[-1] // 2
        turned = (x[..., :half] + 1j * x[..., half:]) * (self.turned.conj() if back else self.turned)
        return np.concatenate([turned.real, turned.imag], axis=-1)


def _norm(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    return x / np.sqrt((x**2).mean(1, keepdims=True) + eps) * weight


def _norm_back(
    by_out: np.ndarray, x: np.ndarray, weight: np.ndarray, eps: float, total: Weights, name: str
) -> np.ndarray:
    scale = 1 / np.sqrt((x**2).mean(1, keepdims=True) + eps)
    total[name] += (by_out * x * scale).sum(0)
    by_normed = by_out * weight
    return scale * by_normed - x * scale**3 * (by_normed * x).mean(1, keepdims=True)


def adam_step(
    weights: Weights, gradient: Weights, moments: tuple[Weights, Weights], step: int, rate: float, clip: float
) -> tuple[Weights, tuple[Weights, Weights]]:
    """Adam (b1 0.9, b2 0.999, eps 1e-8, no decay) on a gradient shortened to a norm of `clip`. step: from 1."""
    norm = np.sqrt(sum((each**2).sum() for each in gradient.values()))
    shorter = {name: each * min(1, clip / norm) for name, each in gradient.items()}
    first = {name: 0.9 * moments[0][name] + 0.1 * each for name, each in shorter.items()}
    second = {name: 0.999 * moments[1][name] + 0.001 * each**2 for name, each in shorter.items()}
    moved = {
        name: weight - rate * (first[name] / (1 - 0.9**step)) / (np.sqrt(second[name] / (1 - 0.999**step)) + 1e-8)
        for name, weight in weights.items()
    }
    return moved, (first, second)
