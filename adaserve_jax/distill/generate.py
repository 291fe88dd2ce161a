"""Draws texts to learn from: by the target, by the draft, or token by token from either.

Every draw is a function of the text's seed and the position, with the noise that serving uses, so that a text of the
target alone is what an engine gives for that prompt and seed. Axes: B texts, S slots of a text, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from adaserve_jax.models.config import ModelConfig
from adaserve_jax.models.decoder import Attend, Params, decode, logits
from adaserve_jax.tree.sampling import gumbel_noise

# A decoder that goes on with several texts at once over a dense KV cache: for drawing texts to learn from, not
# for serving.
#
# Axes: B texts, C tokens that each is extended by, S slots of a text, H/K query/KV heads, D head dim.


class Cache(NamedTuple):
    """Keys and values of all texts, of each layer f[B, S, K, D], the token at position s in slot s. Layers apart: one
    array of all would be copied by every step."""

    k: tuple[jax.Array, ...]
    v: tuple[jax.Array, ...]


def new_cache(config: ModelConfig, texts: int, slots: int, dtype: Any) -> Cache:
    shape = (texts, slots, config.num_kv_heads, config.head_dim)
    k, v = (tuple(jnp.zeros(shape, dtype) for _ in range(config.num_layers)) for _ in range(2))
    return Cache(k, v)


def extend(
    params: Params, config: ModelConfig, cache: Cache, tokens: jax.Array, start: jax.Array, count: jax.Array
) -> tuple[jax.Array, Cache]:
    """Feed each text its next tokens. tokens: i32[B, C], of which count i32[B] are real; start: i32[B], the position of
    the first. Pure. Returns (hidden f[d, B, C], the cache with them). What is not real leaves no trace in the cache.
    """
    texts, added = tokens.shape
    position = start[:, None] + jnp.arange(added, dtype=jnp.int32)
    slot = jnp.where(jnp.arange(added) < count[:, None], position, cache.k[0].shape[1])  # beyond the end: dropped
    new: list[tuple[jax.Array, jax.Array]] = []
    attend = _attend(config, cache, position, slot, new)
    hidden = decode(params, config, tokens.reshape(-1), position.reshape(-1), attend)
    keys, values = zip(*new, strict=True)
    return hidden.reshape(-1, texts, added), Cache(keys, values)


def _attend(
    config: ModelConfig, cache: Cache, position: jax.Array, slot: jax.Array, new: list[tuple[jax.Array, jax.Array]]
) -> Attend:
    """Attention that writes to the cache of each layer before it reads; the layers' caches go to `new`."""
    texts, added = position.shape
    row = jnp.arange(texts)[:, None]

    def attend(layer: int, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        heads, dim, _ = q.shape
        kv_heads = len(k)

        def written(held: jax.Array, fresh: jax.Array) -> jax.Array:
            fresh = jnp.moveaxis(fresh.reshape(kv_heads, dim, texts, added), (0, 1), (2, 3))
            return held.at[row, slot].set(fresh.astype(held.dtype), mode="drop")

        keys, values = written(cache.k[layer], k), written(cache.v[layer], v)
        new.append((keys, values))
        age = position[:, :, None] - jnp.arange(keys.shape[1])
        seen = age >= 0
        window = config.window_of(layer)
        if window is not None:
            seen &= age < window
        highest = jax.lax.Precision.HIGHEST if q.dtype == jnp.float32 else None
        grouped = q.reshape(kv_heads, heads // kv_heads, dim, texts, added)
        scores = jnp.einsum("kgdbc,bskd->kgbcs", grouped, keys, precision=highest, preferred_element_type=jnp.float32)
        weights = jax.nn.softmax(jnp.where(seen, scores * dim**-0.5, -jnp.inf), axis=-1).astype(values.dtype)
        return jnp.einsum("kgbcs,bskd->kgdbc", weights, values, precision=highest).reshape(q.shape)

    return attend


PREFILL = 64
"""Prompt tokens of each text that are fed at once."""
BLOCK = 16
"""Tokens of each text that are drawn by one program."""
MIN_SLOTS = 128
_COIN = 1
"""The choice index of the noise that says which model a token comes from; texts are drawn with choice 0."""


@dataclass(frozen=True)
class Drawing:
    """How texts are drawn. mix: chance of each token to come from the target, else from the draft; 1 needs no draft, 0
    no target. max_tokens: of a text, after its prompt. eos_ids: end a text, and stay in it."""

    mix: float
    max_tokens: int
    temperature: float
    eos_ids: tuple[int, ...]

    @property
    def uses(self) -> tuple[bool, bool]:
        """Whether the target is needed, and the draft."""
        return self.mix > 0, self.mix < 1


class Texts(NamedTuple):
    """What is known of B texts on the device. cache: of each model in use. last: i32[B], the token to feed next, at
    position i32[B]; done: bool[B]; left: i32[B], tokens that may follow; seed: u32[B, 2]."""

    cache: tuple[Cache, ...]
    last: jax.Array
    position: jax.Array
    done: jax.Array
    left: jax.Array
    seed: jax.Array


class Generator:
    """Continues prompts, `rows` of them at a time. models: (target, draft) as configurations, either None if never
    needed. Compiles on first use, for each power of two of slots."""

    def __init__(self, target: ModelConfig | None, draft: ModelConfig | None, *, rows: int, dtype: Any):
        self._configs = (target, draft)
        self._rows = rows
        self._dtype = dtype
        self._programs: dict[Drawing, tuple[Callable, Callable]] = {}

    def texts(
        self,
        params: tuple[Params | None, Params | None],
        prompts: Sequence[np.ndarray],
        seeds: Sequence[int],
        drawing: Drawing,
        on_done: Callable[[int], None] | None = None,
    ) -> list[np.ndarray]:
        """Each prompt with what was drawn after it, i32[tokens], in order.

        params: of target and draft; of a model that drawing does not use, None will do. seeds: u64, one per prompt.
        on_done: called with the number of texts that are finished, now and then. It may raise, and nothing is lost but
        these texts.
        """
        found: dict[int, np.ndarray] = {}
        order = sorted(range(len(prompts)), key=lambda index: len(prompts[index]))
        for first in range(0, len(order), self._rows):
            chosen = order[first : first + self._rows]
            drawn = self._drawn(params, [prompts[i] for i in chosen], [seeds[i] for i in chosen], drawing)
            for done, outputs in drawn:
                if on_done is not None:
                    on_done(len(found) + done)
                if outputs is not None:
                    ends = zip(chosen, outputs, strict=True)
                    found |= {i: np.concatenate([prompts[i], output]).astype(np.int32) for i, output in ends}
        return [found[index] for index in range(len(prompts))]

    def _drawn(
        self, params: tuple[Params | None, Params | None], prompts: list[np.ndarray], seeds: list[int], drawing: Drawing
    ) -> Iterator[tuple[int, list[np.ndarray] | None]]:
        """Outputs of at most `rows` prompts, at the end; until then how many are done."""
        used = [(p, c) for p, c, use in zip(params, self._configs, drawing.uses, strict=True) if use]
        weights = tuple(p for p, _ in used)
        prefill, block = self._programs_of(drawing)
        texts = self._begun(tuple(c for _, c in used if c is not None), prompts, seeds, drawing)
        for tokens, start, count in self._prefills(prompts):
            texts = texts._replace(cache=prefill(weights, texts.cache, tokens, start, count))
        parts = []
        done = 0
        while done < len(prompts):
            texts, tokens = block(weights, texts)
            parts.append(np.asarray(tokens))
            done = int(np.asarray(texts.done)[: len(prompts)].sum())
            yield done, None
        rows = np.concatenate(parts)[:, : len(prompts)].T
        yield done, [row[row >= 0] for row in rows]

    def _begun(
        self, configs: tuple[ModelConfig, ...], prompts: list[np.ndarray], seeds: list[int], drawing: Drawing
    ) -> Texts:
        slots = MIN_SLOTS
        while slots < max(map(len, prompts)) + drawing.max_tokens:
            slots *= 2
        idle = self._rows - len(prompts)
        words = np.array([*seeds, *[0] * idle], np.uint64)
        return Texts(
            cache=tuple(new_cache(config, self._rows, slots, self._dtype) for config in configs),
            last=jnp.asarray(np.array([prompt[-1] for prompt in prompts] + [0] * idle, np.int32)),
            position=jnp.asarray(np.array([len(prompt) - 1 for prompt in prompts] + [0] * idle, np.int32)),
            done=jnp.asarray(np.arange(self._rows) >= len(prompts)),
            left=jnp.full(self._rows, drawing.max_tokens, jnp.int32),
            seed=jnp.asarray(np.stack([words & np.uint64(0xFFFFFFFF), words >> np.uint64(32)], 1).astype(np.uint32)),
        )

    def _prefills(self, prompts: list[np.ndarray]) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        """(tokens i32[B, PREFILL], start i32[B], count i32[B]) that feed all but the last token of every prompt."""
        lengths = np.array([len(prompt) - 1 for prompt in prompts] + [0] * (self._rows - len(prompts)))
        for first in range(0, int(lengths.max()), PREFILL):
            count = np.clip(lengths - first, 0, PREFILL).astype(np.int32)
            tokens = np.zeros((self._rows, PREFILL), np.int32)
            for row, prompt in enumerate(prompts):
                tokens[row, : count[row]] = prompt[first : first + count[row]]
            yield tokens, np.full(self._rows, first, np.int32), count

    def _programs_of(self, drawing: Drawing) -> tuple[Callable, Callable]:
        if drawing not in self._programs:
            configs = tuple(c for c, use in zip(self._configs, drawing.uses, strict=True) if use and c is not None)
            self._programs[drawing] = (
                jax.jit(partial(_prefill, configs), donate_argnums=1),
                jax.jit(partial(_draw_block, configs, drawing), donate_argnums=1),
            )
        return self._programs[drawing]


def _prefill(
    configs: tuple[ModelConfig, ...], params: tuple[Params, ...], caches: tuple[Cache, ...], tokens: jax.Array,
    start: jax.Array, count: jax.Array,
) -> tuple[Cache, ...]:  # fmt: skip
    models = zip(configs, params, caches, strict=True)
    return tuple(extend(p, config, cache, tokens, start, count)[1] for config, p, cache in models)


def _draw_block(
    configs: tuple[ModelConfig, ...], drawing: Drawing, params: tuple[Params, ...], texts: Texts
) -> tuple[Texts, jax.Array]:
    """BLOCK tokens of every text: i32[BLOCK, B], -1 after a text's end."""

    def step(texts: Texts, _: None) -> tuple[Texts, jax.Array]:
        real = jnp.where(texts.done, 0, 1)
        caches, drawn = [], []
        for config, weights, cache in zip(configs, params, texts.cache, strict=True):
            hidden, cache = extend(weights, config, cache, texts.last[:, None], texts.position, real)
            caches.append(cache)
            scores = logits(weights, config, hidden[:, :, 0])
            drawn.append(_drawn_from(scores, texts.seed, texts.position + 1, drawing.temperature))
        token = drawn[0]
        if len(drawn) == 2:
            noise = gumbel_noise(texts.seed, jnp.full_like(texts.last, _COIN), texts.position + 1, 1)[:, 0]
            token = jnp.where(jnp.exp(-jnp.exp(-noise)) < drawing.mix, drawn[0], drawn[1])
        left = texts.left - real
        ended = (left <= 0) | jnp.isin(token, jnp.array(drawing.eos_ids, jnp.int32))
        after = Texts(
            cache=tuple(caches),
            last=jnp.where(texts.done, texts.last, token),
            position=texts.position + real,
            done=texts.done | ended,
            left=left,
            seed=texts.seed,
        )
        return after, jnp.where(texts.done, -1, token)

    return jax.lax.scan(step, texts, None, length=BLOCK)


def _drawn_from(scores: jax.Array, seed: jax.Array, position: jax.Array, temperature: float) -> jax.Array:
    """i32[B], by temperature alone: what is learned from is the target's own distribution. scores: f32[B, V]."""
    if temperature > 0:
        scores = scores / temperature + gumbel_noise(seed, jnp.zeros_like(position), position, scores.shape[1])
    return jnp.argmax(scores, axis=1).astype(jnp.int32)
