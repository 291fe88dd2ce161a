"""Print the tokens per second of torch and of JAX on the demo pair's training step (README.md: why torch)."""

import argparse
import dataclasses
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import optax
import torch
from llama import DRAFT, TARGET, Shape
from train import BATCH_TOKENS, Stream, Trainer

LENGTH = 512


def torch_step() -> Callable[[], object]:
    """Return the trainer's own step, on random tokens."""
    noise = np.random.default_rng(0).integers(0, TARGET.vocab_size, 1 << 20).astype(np.uint16)
    stream = Stream(dict.fromkeys(("lib", "test", "maths", "maths_chat", "code_chat"), noise), seed=0)
    return Trainer(None, stream, limit_s=1e9).step


def init(shape: Shape, key: jax.Array) -> dict:
    """Return random f32 weights."""
    hidden, wide, dim = shape.hidden_size, shape.intermediate_size, shape.head_dim
    query, kv = shape.num_attention_heads * dim, shape.num_key_value_heads * dim
    sizes = {"q": (hidden, query), "k": (hidden, kv), "v": (hidden, kv), "o": (query, hidden)}
    sizes |= {"gate": (hidden, wide), "up": (hidden, wide), "down": (wide, hidden)}
    layers = []
    for layer_key in jax.random.split(key, shape.num_hidden_layers):
        keys = jax.random.split(layer_key, len(sizes))
        layers.append({n: 0.02 * jax.random.normal(k, s) for k, (n, s) in zip(keys, sizes.items(), strict=True)})
    return {"embed": 0.02 * jax.random.normal(key, (shape.vocab_size, hidden)), "layers": layers}


def forward(weights: dict, tokens: jax.Array, shape: Shape, dtype: jnp.dtype) -> jax.Array:
    """Return f32[B, T, V], logits; the arithmetic in `dtype`."""
    weights = jax.tree.map(lambda w: w.astype(dtype), weights)
    batch, length = tokens.shape
    dim, kv_heads = shape.head_dim, shape.num_key_value_heads
    groups = shape.num_attention_heads // kv_heads
    angles = jnp.arange(length)[:, None] / shape.rope_theta ** (jnp.arange(0, dim, 2) / dim)
    cos, sin = (jnp.tile(f(angles), 2)[:, None].astype(dtype) for f in (jnp.cos, jnp.sin))

    def norm(x: jax.Array) -> jax.Array:
        wide = x.astype(jnp.float32)
        return (wide * jax.lax.rsqrt((wide * wide).mean(-1, keepdims=True) + 1e-5)).astype(dtype)

    def rotate(x: jax.Array) -> jax.Array:
        first, second = jnp.split(x, 2, -1)
        return x * cos + jnp.concatenate([-second, first], -1) * sin

    x = weights["embed"][tokens]
    for layer in weights["layers"]:
        y = norm(x)
        q, k, v = ((y @ layer[name]).reshape(batch, length, -1, dim) for name in "qkv")
        q = rotate(q).reshape(batch, length, kv_heads, groups, dim)
        scores = jnp.einsum("btkgd,bskd->bkgts", q, rotate(k)).astype(jnp.float32) * dim**-0.5
        causal = jnp.tril(jnp.ones((length, length), bool))
        mix = jax.nn.softmax(jnp.where(causal, scores, -1e9)).astype(dtype)
        x = x + jnp.einsum("bkgts,bskd->btkgd", mix, v).reshape(batch, length, -1) @ layer["o"]
        y = norm(x)
        x = x + (jax.nn.silu(y @ layer["gate"]) * (y @ layer["up"])) @ layer["down"]
    return (norm(x) @ weights["embed"].T).astype(jnp.float32)


def jax_step(dtype: jnp.dtype) -> Callable[[], object]:
    """Return the same step in JAX: both models forward and backward, clip, AdamW."""
    keys = jax.random.split(jax.random.key(0), 3)
    weights = {"target": init(TARGET, keys[0]), "draft": init(DRAFT, keys[1])}
    batch = jax.random.randint(keys[2], (BATCH_TOKENS // LENGTH, LENGTH + 1), 0, TARGET.vocab_size)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))

    def loss(weights: dict) -> jax.Array:
        target = forward(weights["target"], batch[:, :-1], TARGET, dtype)
        draft = forward(weights["draft"], batch[:, :-1], DRAFT, dtype)
        p = jax.lax.stop_gradient(jax.nn.softmax(target))
        text = optax.softmax_cross_entropy_with_integer_labels(target, batch[:, 1:]).mean()
        return text - (p * jax.nn.log_softmax(draft)).sum(-1).mean()

    @jax.jit
    def update(weights: dict, state: optax.OptState) -> tuple[dict, optax.OptState]:
        updates, state = optimizer.update(jax.grad(loss)(weights), state, weights)
        return optax.apply_updates(weights, updates), state

    @dataclasses.dataclass
    class Run:
        """The weights between steps."""

        weights: dict
        state: optax.OptState

        def step(self) -> None:
            """Take one step and wait for it."""
            self.weights, self.state = jax.block_until_ready(update(self.weights, self.state))

    return Run(weights, optimizer.init(weights)).step


def rate(step: Callable[[], object], seconds: float) -> float:
    """Return tokens per second over about `seconds`, after two steps that do not count."""
    step(), step()
    count, start = 0, time.monotonic()
    while time.monotonic() - start < seconds:
        step()
        count += 1
    return count * BATCH_TOKENS / (time.monotonic() - start)


def main() -> None:
    """Parse the command line and print one line for each way."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=25.0)
    seconds = parser.parse_args().seconds
    print(f"torch {torch.__version__} bf16 autocast: {rate(torch_step(), seconds):.0f} tokens/s")
    for dtype in (jnp.float32, jnp.bfloat16):
        print(f"jax {jax.__version__} {jnp.dtype(dtype).name}: {rate(jax_step(dtype), seconds):.0f} tokens/s")


if __name__ == "__main__":
    main()
