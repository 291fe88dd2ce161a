"""Compiled programs of training, shared by all drafts of one shape: losses, gradients, optimiser steps.

All are compiled before serving starts; weights, optimiser state and batches are their arguments. Axes: T packed tokens,
N rows, K tokens of the target per row, V vocabulary.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import SingleDeviceSharding

from adaserve_jax.distill.heads import FROZEN, STEP_DECAY, HeadTarget, head_steps
from adaserve_jax.distill.records import PackedBatch
from adaserve_jax.errors import ConfigError, UnsupportedModelError
from adaserve_jax.learn_config import LearnConfig
from adaserve_jax.models.config import ModelConfig
from adaserve_jax.models.decoder import HEAD_ROW, Params, attend_dense, decode, logits, param_specs
from adaserve_jax.runtime.compile import CompileCounter, Declared, compile_all
from adaserve_jax.types import Progress

TAIL_FLOOR = 1e-6
"""Smallest probability of all other tokens: 1 - sum p in f32 is no more precise."""
LEAST_LOG_P = -100.0
"""Replaces log 0: its exponential is 0 in f32, and 0 times it is no NaN."""
CLIP_NORM = 1.0
"""Largest norm of a mean gradient; a longer one is scaled down to it."""
FEATURES = "features"
"""The program that reads a head's target, on the devices of the target; the others run on the head's own."""
OF_A_BATCH = ("accumulate", "evaluate")
"""Programs that take a batch, and of a head the features before its tokens."""
OF_ONE_LENGTH = (FEATURES, *OF_A_BATCH)
"""Programs that depend on the length of a micro-step."""
TO_TIME = ("begin", FEATURES, "accumulate")
"""Programs that `TrainPrograms.time_micro_step` runs."""
TIMED_RUNS = 3
"""Micro-steps whose median is the measured time."""


def row_losses(
    draft_logits: jax.Array, ids: jax.Array, log_p: jax.Array, *, kind: str, beta: float, temperature: float
) -> tuple[jax.Array, jax.Array]:
    """Compute the distance of the draft's distribution q from the target's p, and their overlap, row by row.

    A row has K + 1 categories: the target's K likeliest tokens, and all others as one. With K = V there are no others
    and the distance is exact; otherwise it is a lower bound (data processing inequality). Source: Online speculative
    decoding, eq. 3 and 4, and its acceptance rate.

    Args:
        draft_logits: f32[N, V], at temperature 1.
        ids: i32[N, K], all different.
        log_p: f32[N, K], the target's log-probabilities at `temperature`; NaN makes the row's loss NaN.
        kind: "kl", KL(p || q); "reverse_kl", KL(q || p); "jsd", beta KL(p || m) + (1 - beta) KL(q || m) with
            m = beta p + (1 - beta) q.

    Returns:
        (loss f32[N] in nats, overlap f32[N]): overlap is the sum of min(p, q) over the K tokens, a lower bound of the
        acceptance rate.
    """
    log_q = _log_q(draft_logits / temperature, ids)
    log_p = _log_p(log_p, has_tail=ids.shape[1] < draft_logits.shape[1])
    p, q = jnp.exp(log_p), jnp.exp(log_q)
    overlap = jnp.minimum(p, q)[:, : ids.shape[1]].sum(1)
    if kind == "kl":
        return (p * (log_p - log_q)).sum(1), overlap
    if kind == "reverse_kl":
        return (q * (log_q - log_p)).sum(1), overlap
    assert kind == "jsd", kind
    log_m = jnp.logaddexp(jnp.log(beta) + log_p, jnp.log1p(-beta) + log_q)
    return (beta * p * (log_p - log_m) + (1 - beta) * q * (log_q - log_m)).sum(1), overlap


def _log_q(scores: jax.Array, ids: jax.Array) -> jax.Array:
    """Return the draft's log-probabilities of the categories, f32[N, K + 1], or f32[N, V] for K = V. Those of all other
    tokens are summed from their own scores, since 1 - sum q is too coarse."""
    chosen = jnp.take_along_axis(scores, ids, axis=1)
    if ids.shape[1] < scores.shape[1]:
        rows = jnp.arange(len(ids))[:, None]
        others = jax.nn.logsumexp(scores.at[rows, ids].set(-jnp.inf), axis=1, keepdims=True)
        chosen = jnp.concatenate([chosen, others], axis=1)
    return jax.nn.log_softmax(chosen, axis=1)


def _log_p(log_p: jax.Array, *, has_tail: bool) -> jax.Array:
    """Return the target's log-probabilities of the categories. Rounded values may sum to more than 1; they are scaled
    back."""
    log_p = jnp.maximum(log_p.astype(jnp.float32), LEAST_LOG_P)
    total = jnp.exp(log_p).sum(1, keepdims=True)
    if has_tail:
        log_p = jnp.concatenate([log_p, jnp.log(jnp.maximum(1 - total, TAIL_FLOOR))], axis=1)
    return log_p - jnp.log(jnp.maximum(total, 1))


def rows_logits(params: Params, config: ModelConfig, batch: PackedBatch) -> jax.Array:
    """Return the draft's scores f32[N, V] for the successor of each row's token; texts do not see each other."""
    hidden = decode(params, config, batch.tokens, batch.position, attend_dense(config, batch.segment))
    return logits(params, config, hidden[:, batch.at])


def batch_sums(
    params: Params, config: ModelConfig, learn: LearnConfig, batch: PackedBatch
) -> tuple[jax.Array, jax.Array]:
    """Return the weighted sums of loss and overlap over the rows, f32 each. A row of weight 0 adds exactly 0 to them
    and to every gradient, whatever it holds."""
    return _sums(rows_logits(params, config, batch), learn, batch, batch.weight)


def _sums(scores: jax.Array, learn: LearnConfig, batch: PackedBatch, weight: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return what `batch_sums` does, from the draft's scores f32[N, V] and the rows' weights f32[N]."""
    real = weight > 0
    log_p = jnp.where(real[:, None], batch.log_p, -jnp.log(batch.log_p.shape[1] + 1.0))
    loss, overlap = row_losses(
        scores, jnp.where(real[:, None], batch.ids, 0), log_p,
        kind=learn.learn_loss, beta=learn.learn_beta, temperature=learn.learn_temperature,
    )  # fmt: skip
    return jnp.where(real, weight * loss, 0).sum(), jnp.where(real, weight * overlap, 0).sum()


def head_sums(
    params: Params, config: ModelConfig, learn: LearnConfig, batch: PackedBatch, features: jax.Array, decay: float
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return the weighted sums of loss, overlap and weights of a head over the rows of all steps.

    features: as for `head_steps`. decay: factor of a step's weights on those of the one before. A row counts in the
    steps that have a root before it. Tokens that the head lacks are left out of the target's distribution, since no
    head could come nearer to them, and count as never accepted.
    """
    reachable = batch
    if HEAD_ROW in params:
        lacking = params[HEAD_ROW][batch.ids] < 0
        lost = jnp.where(lacking, jnp.exp(batch.log_p), 0).sum(1, keepdims=True)
        log_p = jnp.where(lacking, LEAST_LOG_P, batch.log_p - jnp.log(jnp.maximum(1 - lost, TAIL_FLOOR)))
        reachable = batch._replace(log_p=log_p)
    sums = []
    for step, (scores, below) in enumerate(head_steps(params, config, batch, features)):
        weight = jnp.where(below[batch.at], batch.weight * decay**step, 0)
        scores = jnp.maximum(scores, LEAST_LOG_P)
        loss, overlap = _sums(scores, learn, reachable, weight)[0], _sums(scores, learn, batch, weight)[1]
        sums.append(jnp.stack([loss, overlap, weight.sum()]))
    loss, overlap, weights = sum(sums[1:], sums[0])
    return loss, overlap, weights


class LowRank(NamedTuple):
    """Low-rank update a @ b of one weight (LoRA, Hu et al.). a: f32[out, r], 0 at the start; b: f32[r, in]."""

    a: jax.Array
    b: jax.Array


Trained = dict[str, Any]
"""Trained arrays by weight name: f32 of its shape, or a LowRank."""


def begin(params: Params, rank: int, frozen: Sequence[str] = ()) -> tuple[Trained, Params]:
    """Return (trained arrays, base weights): all weights in f32 and no base, or for rank > 0 a LowRank for each matrix
    except the embedding, and all weights as the base. frozen: weights that stay in the base in any case."""
    if rank == 0:
        trained = {name: weight.astype(jnp.float32) for name, weight in params.items() if name not in frozen}
        return trained, {name: params[name] for name in frozen if name in params}
    names = [name for name, weight in params.items() if _is_updated(name, weight.shape)]
    keys = jax.random.split(jax.random.key(0), len(names))
    trained: Trained = {}
    for name, key in zip(names, keys, strict=True):
        outputs, inputs = params[name].shape
        b = jax.random.normal(key, (rank, inputs), jnp.float32) * inputs**-0.5
        trained[name] = LowRank(jnp.zeros((outputs, rank), jnp.float32), b)
    return trained, params


def merged(trained: Trained, base: Params, dtype: Any) -> Params:
    """Return the draft's weights in its serving type."""

    def weight(name: str, each: Any) -> jax.Array:
        if not isinstance(each, LowRank):
            return each.astype(dtype)
        update = jnp.matmul(each.a, each.b, precision=jax.lax.Precision.HIGHEST)
        return (base[name].astype(jnp.float32) + update).astype(dtype)

    return base | {name: weight(name, each) for name, each in trained.items()}


def check_trainable(config: ModelConfig) -> None:
    """Raise UnsupportedModelError for a mixture of experts, whose grouped products have no gradient here."""
    if config.experts is not None:
        raise UnsupportedModelError("a draft that learns must be dense, got a mixture of experts; use a dense draft")


def frozen_of(config: ModelConfig) -> tuple[str, ...]:
    """Return the weights that are not trained: none of a model's."""
    return () if config.eagle3 is None else FROZEN


def num_trained(config: ModelConfig, rank: int) -> int:
    shapes = {name: shape for name, (shape, _) in param_specs(config).items()}
    if rank == 0:
        return sum(math.prod(shape) for name, shape in shapes.items() if name not in frozen_of(config))
    return sum(rank * sum(shape) for name, shape in shapes.items() if _is_updated(name, shape))


def _is_updated(name: str, shape: tuple[int, ...]) -> bool:
    return len(shape) == 2 and name != "embed"


class State(NamedTuple):
    """Trained arrays and optimiser state, which an optimiser step changes."""

    trained: Trained
    optimiser: Any


class GradientSums(NamedTuple):
    """Sums over the micro-steps since the last optimiser step. gradients: like Trained; loss, weight: f32."""

    gradients: Trained
    loss: jax.Array
    weight: jax.Array


class TrainPrograms:
    """Programs that train a draft of one shape in micro-steps of `num_tokens` tokens; `compile` fills `compiled`."""

    def __init__(
        self, config: ModelConfig, learn: LearnConfig, num_tokens: int, dtype: Any,
        counter: CompileCounter | None = None, target: HeadTarget | None = None,
    ) -> None:  # fmt: skip
        """Declare the programs.

        dtype: serving type of the draft, in which products are computed; trained numbers are f32. counter: counts
        compilations while a program runs. target: of a head; without it, a head has no programs of OF_ONE_LENGTH. They
        run on the first local device.
        Raises UnsupportedModelError: the draft is a mixture of experts.
        """
        check_trainable(config)
        assert config.is_head or target is None
        self.config, self.learn, self.num_tokens = config, learn, num_tokens
        self._target = target
        self.dtype = jnp.dtype(dtype)
        self.device = jax.local_devices()[0]
        self.top_k = min(learn.learn_top_k, config.vocab_size)
        self.compiled: dict[tuple[Any, ...], Callable] = {}
        self._counter = counter
        self._optimiser = optax.chain(
            optax.clip_by_global_norm(CLIP_NORM), optax.adamw(learn.learn_rate, weight_decay=0.0)
        )

    def compile(self, progress: Progress | None = None, only: Sequence[str] | None = None) -> None:
        """Compile the programs that are not compiled yet, or those in `only`; then run all once, since a first run is
        slow (not with `only`)."""
        declared = [each for each in self._declared() if each.key not in self.compiled]
        self.compiled |= compile_all([each for each in declared if only is None or each.key[0] in only], progress)
        if declared and only is None:
            self._warm_up()

    def with_length(self, num_tokens: int) -> TrainPrograms:
        """Return programs for another length of micro-steps, sharing those that do not depend on it."""
        other = TrainPrograms(self.config, self.learn, num_tokens, self.dtype, self._counter, self._target)
        other.compiled = {key: each for key, each in self.compiled.items() if key[0] not in OF_ONE_LENGTH}
        return other

    def run(self, name: str, *arguments: Any) -> Any:
        """Run a program and return its result on the device. Arguments that `_declared` donates are used up."""
        with self._counter or contextlib.nullcontext():
            if name in OF_A_BATCH and self._target is not None:
                arguments = (*arguments, self._features(self._target, arguments[-1]))
            return self.compiled[(name,)](*arguments)

    def _features(self, target: HeadTarget, batch: PackedBatch) -> jax.Array:
        """Return the features before a batch's tokens, f[F, T], on the head's device."""
        features = self.compiled[(FEATURES,)](target.params, batch)
        if target.placement.blocks:
            jax.block_until_ready(features)
        return features.addressable_data(0)

    def check(self, batch: PackedBatch) -> None:
        """Raise ConfigError if a batch's shape is not the compiled one."""
        expected, found = (self.num_tokens, self.top_k), (len(batch.tokens), batch.ids.shape[1])
        if found != expected:
            raise ConfigError(
                f"a batch must have {expected[0]} tokens and {expected[1]} target tokens per row, "
                f"got {found[0]} and {found[1]}; pack records that were made with this learn_top_k"
            )

    def time_micro_step(self) -> float:
        """Measure the median seconds of a micro-step on zero weights. Needs TO_TIME."""
        state, base, sums = self._begin_with_zeros()
        batch, times = self._row_per_token(), []
        for _ in range(TIMED_RUNS + 1):  # the first one warms up
            start = time.perf_counter()
            sums = jax.block_until_ready(self.run("accumulate", state.trained, base, sums, batch))
            times.append(time.perf_counter() - start)
        return float(np.median(times[1:]))

    def _warm_up(self) -> None:
        state, base, sums = self._begin_with_zeros()
        batch = self._row_per_token()
        self.run("evaluate", state.trained, base, batch)
        self.run("export", state.trained, base)
        sums = self.run("no_sums", self.run("accumulate", state.trained, base, sums, batch))
        state = self.run("copy", state, self._begin_with_zeros()[0])
        jax.block_until_ready(self.run("apply", state, sums, np.float32(1)))

    def _begin_with_zeros(self) -> tuple[State, Params, GradientSums]:
        params = {name: np.zeros(each.shape, each.dtype) for name, each in self._abstract_params().items()}
        return self.run("begin", jax.device_put(params, self.device))

    def _begin(self, params: Params) -> tuple[State, Params, GradientSums]:
        trained, base = begin(params, self.learn.learn_lora_rank, frozen_of(self.config))
        trained, base = _copy((trained, base))  # copies, since training donates its arrays
        return State(trained, self._optimiser.init(trained)), base, _no_sums(trained)

    def _sums_of(
        self, trained: Trained, base: Params, batch: PackedBatch, features: jax.Array | None, decay: float
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Return the sums of loss, overlap and weights. features: of a head. decay: as for `head_sums`."""
        params = merged(trained, base, self.dtype)
        if features is None:
            return *batch_sums(params, self.config, self.learn, batch), batch.weight.sum()
        return head_sums(params, self.config, self.learn, batch, features, decay)

    def _accumulate(
        self, trained: Trained, base: Params, sums: GradientSums, batch: PackedBatch,
        features: jax.Array | None = None,
    ) -> GradientSums:  # fmt: skip
        def loss_of(trained: Trained) -> tuple[jax.Array, jax.Array]:
            loss, _, weight = self._sums_of(trained, base, batch, features, STEP_DECAY)
            return loss, weight

        (loss, weight), gradients = jax.value_and_grad(loss_of, has_aux=True)(trained)
        gradients = jax.tree.map(jnp.add, sums.gradients, gradients)
        return GradientSums(gradients, sums.loss + loss, sums.weight + weight)

    def _apply(self, state: State, sums: GradientSums, rate_share: jax.Array) -> tuple[State, GradientSums, jax.Array]:
        """Apply the mean gradient; also return f32[3]: mean loss, norm of the mean gradient, 1 if the state changed."""
        mean = jax.tree.map(lambda each: each / sums.weight, sums.gradients)
        loss, norm = sums.loss / sums.weight, jnp.sqrt(sum(jnp.sum(each**2) for each in jax.tree.leaves(mean)))
        finite = jnp.isfinite(loss) & jnp.isfinite(norm)

        def updated(state: State) -> State:
            updates, optimiser = self._optimiser.update(mean, state.optimiser, state.trained)
            updates = jax.tree.map(lambda each: each * rate_share, updates)
            return State(optax.apply_updates(state.trained, updates), optimiser)  # type: ignore[arg-type]

        state = jax.lax.cond(finite, updated, lambda state: state, state)
        return state, _no_sums(state.trained), jnp.stack([loss, norm, finite.astype(jnp.float32)])

    def _evaluate(
        self, trained: Trained, base: Params, batch: PackedBatch, features: jax.Array | None = None
    ) -> jax.Array:
        """Return f32[3]: sums of overlap, loss and weights; of a head, over all steps alike."""
        loss, overlap, weight = self._sums_of(trained, base, batch, features, 1.0)
        return jnp.stack([overlap, loss, weight])

    def _declared(self) -> list[Declared]:
        def export(trained: Trained, base: Params) -> Params:
            return _copy(merged(trained, base, self.dtype))  # they serve while training donates its own arrays

        params = self._abstract_params()
        state, base, sums = jax.tree.map(self._on_device, jax.eval_shape(self._begin, params))
        rate_share = self._on_device(jax.ShapeDtypeStruct((), jnp.float32))
        return [
            Declared(("begin",), jax.jit(self._begin), (params,)),
            *self._declared_of_one_length(state.trained, base, sums),
            Declared(("apply",), jax.jit(self._apply, donate_argnums=(0, 1)), (state, sums, rate_share)),
            Declared(("copy",), _in_place(lambda state, old: _copy(state), 1), (state, state)),
            Declared(("no_sums",), _in_place(lambda old: _no_sums(old.gradients), 0), (sums,)),
            Declared(("export",), jax.jit(export), (state.trained, base)),
        ]

    def _declared_of_one_length(self, trained: Any, base: Any, sums: Any) -> list[Declared]:
        """Declare the programs of OF_ONE_LENGTH, of a head with the features that its target's program returns."""
        target = self._target
        if self.config.is_head and target is None:
            return []
        batch, declared, features = self._row_per_token(), [], ()
        if target is not None:
            there = jax.tree.map(lambda each: target.placement.abstract(each.shape, each.dtype), batch)
            read = jax.jit(lambda params, batch: target.features(params, self.config, batch))
            declared = [Declared((FEATURES,), read, (target.params, there))]
            features = (self._on_device(jax.eval_shape(read, target.params, there)),)
        here = jax.tree.map(self._on_device, batch)
        return [
            *declared,
            Declared(
                ("accumulate",), jax.jit(self._accumulate, donate_argnums=2), (trained, base, sums, here, *features)
            ),
            Declared(("evaluate",), jax.jit(self._evaluate), (trained, base, here, *features)),
        ]  # fmt: skip

    def _abstract_params(self) -> dict[str, jax.ShapeDtypeStruct]:
        shapes = {name: shape for name, (shape, _) in param_specs(self.config).items()}
        dtypes = dict.fromkeys(shapes, self.dtype) | {HEAD_ROW: jnp.dtype(jnp.int32)}
        return {name: self._on_device(jax.ShapeDtypeStruct(shape, dtypes[name])) for name, shape in shapes.items()}

    def _on_device(self, array: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=SingleDeviceSharding(self.device))

    def _row_per_token(self) -> PackedBatch:
        """Return a batch of one text with a row at each token."""
        count = self.num_tokens
        index = np.arange(count, dtype=np.int32)
        ids = np.broadcast_to(np.arange(self.top_k, dtype=np.int32), (count, self.top_k))
        log_p = np.full((count, self.top_k), -np.log(self.top_k + 1), np.float32)
        zeros = np.zeros_like(index)
        return PackedBatch(zeros, index, zeros, index, ids, log_p, np.ones(count, np.float32))


def _copy(arrays: Any) -> Any:
    return jax.tree.map(jnp.copy, arrays)


def _in_place(function: Callable, argument: int) -> Any:
    """Compile a function whose result replaces an argument in memory; it need not read that argument."""
    return jax.jit(function, donate_argnums=argument, keep_unused=True)


def _no_sums(trained: Trained) -> GradientSums:
    return GradientSums(jax.tree.map(jnp.zeros_like, trained), jnp.zeros((), jnp.float32), jnp.zeros((), jnp.float32))
