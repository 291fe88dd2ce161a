"""Generation of texts to learn from: by the target, by the draft, or token by token from either.

Every draw depends on the text's seed and the position only, with the noise that serving uses, so that a text of the
target alone equals what an engine returns for that prompt and seed. Axes: B texts, C tokens that each is extended by,
S slots of a text, H/K query/KV heads, D head dim, V vocabulary.
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
from adaserve_jax.models.decoder import Attend, Params, attention_weights, decode, logits
from adaserve_jax.tree.sampling import gumbel_noise

PREFILL = 64
"""Prompt tokens of each text that are fed at once."""
BLOCK = 16
"""Tokens of each text that one program draws."""
MIN_SLOTS = 128
_COIN = 1
"""Choice index of the noise that decides which model a token comes from; texts are drawn with choice 0."""


class Cache(NamedTuple):
    """Dense KV cache of all texts: per layer f[B, S, K, D], position s in slot s. Layers are separate arrays, since one
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
    """Feed each text its next tokens, and return (hidden f[d, B, C], new cache).

    tokens: i32[B, C]. start: i32[B], position of the first token. count: i32[B], number of real tokens; the others are
    not written to the cache.
    """
    texts, added = tokens.shape
    position = start[:, None] + jnp.arange(added, dtype=jnp.int32)
    slots = cache.k[0].shape[1]
    slot = jnp.where(jnp.arange(added) < count[:, None], position, slots)  # writes beyond the end are dropped
    new: list[tuple[jax.Array, jax.Array]] = []
    attend = _attend(config, cache, position, slot, new)
    hidden = decode(params, config, tokens.reshape(-1), position.reshape(-1), attend)
    keys, values = zip(*new, strict=True)
    return hidden.reshape(-1, texts, added), Cache(keys, values)


def _attend(
    config: ModelConfig, cache: Cache, position: jax.Array, slot: jax.Array, new: list[tuple[jax.Array, jax.Array]]
) -> Attend:
    """Build attention that writes a layer's cache before it reads it, and appends the layer's cache to `new`."""
    texts, added = position.shape
    row = jnp.arange(texts)[:, None]

    def attend(layer: int, q: jax.Array, k: jax.Array, v: jax.Array, sinks: jax.Array | None) -> jax.Array:
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
        by_head = None if sinks is None else sinks.reshape(kv_heads, -1, 1, 1)
        weights = attention_weights(scores * dim**-0.5, seen, config.attention_softcap, by_head).astype(values.dtype)
        return jnp.einsum("kgbcs,bskd->kgdbc", weights, values, precision=highest).reshape(q.shape)

    return attend


@dataclass(frozen=True)
class Drawing:
    """Sampling of texts.

    mix: probability that a token comes from the target, not the draft; 1 needs no draft, 0 no target. max_tokens: most
    tokens after the prompt. eos_ids: end a text and stay in it.
    """

    mix: float
    max_tokens: int
    temperature: float
    eos_ids: tuple[int, ...]

    @property
    def uses(self) -> tuple[bool, bool]:
        """Flags (target is needed, draft is needed)."""
        return self.mix > 0, self.mix < 1


class Texts(NamedTuple):
    """State of B texts on the device.

    cache: one per model in use. last: i32[B], token to feed next. position: i32[B], its position. done: bool[B]. left:
    i32[B], tokens that may follow. seed: u32[B, 2].
    """

    cache: tuple[Cache, ...]
    last: jax.Array
    position: jax.Array
    done: jax.Array
    left: jax.Array
    seed: jax.Array


class Generator:
    """Continues prompts, `rows` at a time, with tokens that the target has. Either model is None if never needed.
    Compiles on first use, for each power of two of slots."""

    def __init__(self, target: ModelConfig | None, draft: ModelConfig | None, *, rows: int, dtype: Any):
        self._configs = (target, draft)
        self._vocab_size = None if target is None else target.vocab_size
        self._rows = rows
        self._dtype = dtype
        self._programs: dict[Drawing, tuple[Callable, Callable]] = {}

    def texts(
        self,
        params: tuple[Params | None, Params | None],
        prompts: Sequence[np.ndarray],
        seeds: Sequence[int],
        drawing: Drawing,
        on_done: Callable[[int], None] = lambda _: None,
    ) -> list[np.ndarray]:
        """Return each prompt with the tokens drawn after it, i32[tokens], in order.

        params: weights of target and draft; None for a model that `drawing` does not use. seeds: u64, one per prompt.
        on_done: called now and then with the number of finished texts; it may raise to stop.
        """
        found: dict[int, np.ndarray] = {}
        order = sorted(range(len(prompts)), key=lambda index: len(prompts[index]))
        for first in range(0, len(order), self._rows):
            chosen = order[first : first + self._rows]
            drawn = self._drawn(params, [prompts[i] for i in chosen], [seeds[i] for i in chosen], drawing)
            for done, outputs in drawn:
                on_done(len(found) + done)
                if outputs is not None:
                    ends = zip(chosen, outputs, strict=True)
                    found |= {i: np.concatenate([prompts[i], output]).astype(np.int32) for i, output in ends}
        return [found[index] for index in range(len(prompts))]

    def _drawn(
        self, params: tuple[Params | None, Params | None], prompts: list[np.ndarray], seeds: list[int], drawing: Drawing
    ) -> Iterator[tuple[int, list[np.ndarray] | None]]:
        """Draw at most `rows` texts; yield (texts done, None) meanwhile and (texts done, outputs) at the end."""
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
        """Yield (tokens i32[B, PREFILL], start i32[B], count i32[B]) that feed all but each prompt's last token."""
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
                jax.jit(partial(_draw_block, configs, self._vocab_size, drawing), donate_argnums=1),
            )
        return self._programs[drawing]


def _prefill(
    configs: tuple[ModelConfig, ...], params: tuple[Params, ...], caches: tuple[Cache, ...], tokens: jax.Array,
    start: jax.Array, count: jax.Array,
) -> tuple[Cache, ...]:  # fmt: skip
    models = zip(configs, params, caches, strict=True)
    return tuple(extend(p, config, cache, tokens, start, count)[1] for config, p, cache in models)


def _draw_block(
    configs: tuple[ModelConfig, ...], vocab_size: int | None, drawing: Drawing, params: tuple[Params, ...], texts: Texts
) -> tuple[Texts, jax.Array]:
    """Draw BLOCK tokens of every text, i32[BLOCK, B]; -1 after a text's end. vocab_size: of the target, whose tokens
    alone are drawn; None: any."""

    def step(texts: Texts, _: None) -> tuple[Texts, jax.Array]:
        real = jnp.where(texts.done, 0, 1)
        caches, drawn = [], []
        for config, weights, cache in zip(configs, params, texts.cache, strict=True):
            hidden, cache = extend(weights, config, cache, texts.last[:, None], texts.position, real)
            caches.append(cache)
            scores = logits(weights, config, hidden[:, :, 0])[:, :vocab_size]
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
    """Draw i32[B] from scores f32[B, V] by temperature alone, since drafts learn the target's own distribution."""
    if temperature > 0:
        scores = scores / temperature + gumbel_noise(seed, jnp.zeros_like(position), position, scores.shape[1])
    return jnp.argmax(scores, axis=1).astype(jnp.int32)
