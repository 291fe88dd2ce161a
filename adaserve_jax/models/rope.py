"""Rotary frequencies, scaled for long contexts as in transformers (transformers/modeling_rope_utils.py).

Values are rounded to f32 where transformers rounds them: models are trained with these angles, and exact ones move the
logits by 6e-4 at position 2,000.

`dynamic` (NTK) needs no class. Up to max_position_embeddings it changes nothing, and the context limit refuses longer
texts. Beyond, every frequency depends on the length of the text, so each new token would change all cached keys;
transformers does not do that either, and its logits with and without a cache differ.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from adaserve_jax.errors import UnsupportedModelError
from adaserve_jax.models.config_values import ConfigValues

DEFAULT_THETA = 10000.0
KINDS = ("default", "linear", "dynamic", "llama3", "yarn")
SCALING_KEYS = frozenset({
    "rope_type", "type", "factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor",
    "attention_factor", "attn_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate", "finetuned",
    "short_factor", "long_factor",
})  # fmt: skip
"""Rotary settings that any family may have beside its base and the share of a head that is rotated. attn_factor, of
DeepSeek's distillation onto Qwen3, is read by neither transformers nor vLLM."""
_KEYS = SCALING_KEYS | {"rope_theta", "partial_rotary_factor"}
_ALPHA = "alpha"
_GROWTH_KEYS = ("llama_4_scaling_beta", "max_position_embeddings")


@dataclass(frozen=True)
class LinearScaling:
    """Positions divided by factor."""

    factor: float
    magnitude = 1.0

    def frequencies(self, theta: float, head_dim: int) -> np.ndarray:
        return plain_frequencies(theta, head_dim) / np.float32(self.factor)

    def max_position(self, trained: int) -> int:
        return int(trained * self.factor)


@dataclass(frozen=True)
class Llama3Scaling:
    """Long wavelengths multiplied by factor, short ones kept, a smooth transition between. original: context in tokens
    before the extension."""

    factor: float
    low: float
    high: float
    original: int
    magnitude = 1.0

    def frequencies(self, theta: float, head_dim: int) -> np.ndarray:
        plain = plain_frequencies(theta, head_dim)
        wavelength = np.float32(2 * math.pi) / plain
        scaled = np.where(wavelength > np.float32(self.original / self.low), plain / np.float32(self.factor), plain)
        smooth = (np.float32(self.original) / wavelength - np.float32(self.low)) / np.float32(self.high - self.low)
        passage = (1 - smooth) * scaled / np.float32(self.factor) + smooth * scaled
        short, long = wavelength < self.original / self.high, wavelength > self.original / self.low
        return np.where(short | long, scaled, passage).astype(np.float32)

    def max_position(self, trained: int) -> int:
        return trained


@dataclass(frozen=True)
class YarnScaling:
    """Pairs that turn often keep their frequency, others have it divided by factor, with a ramp between.

    cos and sin are multiplied by magnitude. beta_fast, beta_slow: turns over `original` tokens at the ends of the ramp.
    truncate: round these ends outward to whole pairs.
    """

    factor: float
    original: int
    magnitude: float
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True

    def frequencies(self, theta: float, head_dim: int) -> np.ndarray:
        powers = _powers(theta, head_dim)
        low, high = (self._pair(turns, theta, head_dim) for turns in (self.beta_fast, self.beta_slow))
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, head_dim - 1)
        width = high - low or 0.001
        pairs = np.arange(head_dim // 2, dtype=np.float32)
        kept = 1 - np.clip((pairs - np.float32(low)) / np.float32(width), 0, 1)
        return 1 / (np.float32(self.factor) * powers) * (1 - kept) + 1 / powers * kept

    def _pair(self, turns: float, theta: float, head_dim: int) -> float:
        """Return the pair, not rounded, that turns so often over the original context."""
        return head_dim * math.log(self.original / (turns * 2 * math.pi)) / (2 * math.log(theta))

    def max_position(self, trained: int) -> int:
        return max(trained, int(self.original * self.factor))


@dataclass(frozen=True)
class LongRopeScaling:
    """Each pair's frequency divided by a factor of its own (LongRoPE): by one of `short` for texts of up to `original`
    tokens, by one of `long` for longer ones. cos and sin are multiplied by magnitude."""

    short: tuple[float, ...]
    long: tuple[float, ...]
    original: int
    magnitude: float
    is_long: bool = False

    def frequencies(self, theta: float, head_dim: int) -> np.ndarray:
        factors = np.asarray(self.long if self.is_long else self.short, np.float32)
        return 1 / (factors * _powers(theta, head_dim))

    def max_position(self, trained: int) -> int:
        return trained


RopeScaling = LinearScaling | Llama3Scaling | YarnScaling | LongRopeScaling


def plain_frequencies(theta: float, head_dim: int) -> np.ndarray:
    """Return theta^(-2i / D), f32[D/2]: radians per token of pair i."""
    return 1 / _powers(theta, head_dim)


def _powers(theta: float, head_dim: int) -> np.ndarray:
    exponents = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    return np.power(theta, exponents, dtype=np.float64).astype(np.float32)


def read_rope(
    top: ConfigValues, *, by_layer: bool = False, of_phi: bool = False, partial: bool = False, growing: bool = False,
    alpha_dim: int | None = None,
) -> tuple[float, RopeScaling | None]:  # fmt: skip
    """Return base and scaling (None: plain) of a config.json, with keys of transformers 5 (rope_parameters) or older
    ones (rope_theta, rope_scaling).

    by_layer: rope_parameters may have parts of their own for each kind of layer; those of full attention are returned.
    of_phi: any scaling is longrope, whatever it is called. partial: a share of each head may be rotated. growing: as
    for `read_query_growth`. alpha_dim: head dimension, D, of a family in which `dynamic` may have an alpha, whatever
    the length of the text: its base is multiplied by alpha^(D / (D - 2)), so that the slowest pair's frequency is
    divided by alpha. None: alpha is refused.
    Raises CheckpointError, UnsupportedModelError.
    """
    name, given = _rope_of(top)
    if by_layer and _is_by_layer(given):
        name, given = f"{name}.full_attention", given["full_attention"]
    if not isinstance(given, dict):
        raise top.wrong(name, given, "an object")
    if any(isinstance(value, dict) for value in given.values()):
        raise top.unsupported(name, "one for all layers is")
    rope = ConfigValues(given, top.path, name)
    _refuse_unknown(rope, (*(_GROWTH_KEYS if growing else ()), *((_ALPHA,) if alpha_dim else ())))
    if not partial:
        _refuse_partial(rope)
        _refuse_partial(top)
    theta = rope.positive("rope_theta") if "rope_theta" in given else top.positive("rope_theta", DEFAULT_THETA)
    if of_phi and (rope.get("rope_type") or rope.get("type")) in ("longrope", "su", "yarn"):
        return theta, _longrope(rope, top)
    if alpha_dim and (rope.get("rope_type") or rope.get("type")) == "dynamic" and rope.get(_ALPHA):
        theta *= rope.positive(_ALPHA) ** (alpha_dim / (alpha_dim - 2))
    scaling = _scaling(rope, name, top)
    if isinstance(scaling, YarnScaling) and theta <= 1:
        raise top.wrong("rope_theta", theta, "above 1 with yarn, whose ramp divides by its logarithm")
    return theta, scaling


def _refuse_unknown(rope: ConfigValues, more: tuple[str, ...] = ()) -> None:
    """Raise UnsupportedModelError for a rotary setting that is neither common nor one of `more`."""
    for key in rope.values:
        if key not in _KEYS and key not in more:
            raise rope.unsupported(key)


def _refuse_partial(settings: ConfigValues) -> None:
    if settings.get("partial_rotary_factor") not in (None, 1.0):
        raise settings.unsupported("partial_rotary_factor", "only 1.0 is")


def _rope_of(top: ConfigValues) -> tuple[str, Any]:
    """Return the rotary settings of a config.json, {} without any, and their name: the older one goes first."""
    name = "rope_scaling" if top.get("rope_scaling") else "rope_parameters"
    return name, top.get(name) or {}


def read_query_growth(top: ConfigValues) -> tuple[float, int] | None:
    """Return by how much queries grow with their position, and the context, in tokens, behind which they do
    (`layers.query_scale`); None if they do not. Raises CheckpointError."""
    name, given = _rope_of(top)
    rope = ConfigValues(given if isinstance(given, dict) else {}, top.path, name)
    beta = rope.optional("llama_4_scaling_beta") if rope.get("llama_4_scaling_beta") != 0 else None
    return None if beta is None else (beta, rope.integer("original_max_position_embeddings"))


def read_rotary_share(top: ConfigValues) -> float:
    """Return the share of each head's features that is rotated. Raises CheckpointError."""
    _, rope = _rope_of(top)
    given = rope.get("partial_rotary_factor") if isinstance(rope, dict) else None
    share = top.get("partial_rotary_factor") if given is None else given
    if share is None:
        return 1.0
    if not isinstance(share, (int, float)) or isinstance(share, bool) or not 0 < share <= 1:
        raise top.wrong("partial_rotary_factor", share, "a number above 0 and at most 1")
    return float(share)


def _longrope(rope: ConfigValues, top: ConfigValues) -> LongRopeScaling:
    def factors(name: str) -> tuple[float, ...]:
        given = rope.get(name)
        if not isinstance(given, list) or not all(isinstance(each, (int, float)) and each > 0 for each in given):
            raise rope.wrong(name, given, "a list of numbers above 0")
        return tuple(map(float, given))

    before = "original_max_position_embeddings"
    holder = rope if top.get(before) is None else top
    original = holder.integer(before)
    if original < 2:  # the magnitude divides by its logarithm
        raise holder.wrong(before, original, "an integer >= 2")
    factor = rope.optional("factor") or top.integer("max_position_embeddings") / original
    magnitude = rope.optional("attention_factor")
    if magnitude is None:
        magnitude = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    return LongRopeScaling(factors("short_factor"), factors("long_factor"), original, magnitude)


def read_window_rope(top: ConfigValues, default: float) -> float:
    """Return the base of layers with a sliding window, of a config.json that gives them one of their own, in new keys
    (rope_parameters.sliding_attention) or older ones (rope_local_base_freq). default: if the file does not say. Raises
    as `read_rope` does."""
    given = top.get("rope_parameters") or {}
    if not _is_by_layer(given):
        return top.positive("rope_local_base_freq", default)
    rope = ConfigValues(given["sliding_attention"], top.path, "rope_parameters.sliding_attention")
    _refuse_unknown(rope)
    _refuse_partial(rope)
    for name in ("rope_type", "type"):
        if rope.get(name) not in (None, "default"):
            raise rope.unsupported(name, "only 'default' is in layers with a window")
    return rope.positive("rope_theta", default)


def _is_by_layer(given: object) -> bool:
    kinds = {"full_attention", "sliding_attention"}
    return isinstance(given, dict) and given.keys() == kinds and all(isinstance(each, dict) for each in given.values())


def _scaling(rope: ConfigValues, name: str, top: ConfigValues) -> RopeScaling | None:
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind not in KINDS:
        raise UnsupportedModelError(
            f"{rope.path}: {name} of type {kind!r} is not supported; use one of {', '.join(KINDS)}"
        )
    if kind in ("default", "dynamic"):
        return None
    if kind == "linear":
        return LinearScaling(rope.positive("factor"))
    trained = top.integer("max_position_embeddings")
    before = "original_max_position_embeddings"
    original = top.integer(before) if top.get(before) else rope.integer(before, default=trained)
    if kind == "llama3":
        low, high = rope.positive("low_freq_factor"), rope.positive("high_freq_factor")
        if high <= low:
            raise rope.wrong("high_freq_factor", high, f"above low_freq_factor ({low:g})")
        return Llama3Scaling(rope.positive("factor"), low, high, original)
    has_factor = "factor" not in rope.values or rope.values["factor"] is not None
    factor = rope.positive("factor") if has_factor else trained / original
    return YarnScaling(
        factor, original, _yarn_magnitude(rope, factor), rope.optional("beta_fast") or 32.0,
        rope.optional("beta_slow") or 1.0, rope.boolean("truncate", True),
    )  # fmt: skip


def _yarn_magnitude(rope: ConfigValues, factor: float) -> float:
    def magnitude(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    given = rope.optional("attention_factor")
    if given is not None:
        return given
    weight, weight_all = rope.get("mscale"), rope.get("mscale_all_dim")
    if weight and weight_all:
        return magnitude(rope.positive("mscale")) / magnitude(rope.positive("mscale_all_dim"))
    return magnitude(1.0)
