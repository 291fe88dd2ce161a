"""The compiled programs of training one shape of draft, shared by all drafts of that shape.

All are compiled before serving starts; weights, optimiser state and batches are their arguments.
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

from adaserve_jax.distill.records import PackedBatch
from adaserve_jax.errors import ConfigError
from adaserve_jax.learn_config import LearnConfig
from adaserve_jax.models.config import ModelConfig
from adaserve_jax.models.decoder import Params, attend_dense, decode, logits, param_specs
from adaserve_jax.runtime.compile import CompileCounter, Declared, compile_all
from adaserve_jax.types import Progress

# Distances of the draft's distribution from the target's, from the target's K likeliest tokens.
#
# A position has K + 1 categories: those K tokens, and all others as one. With K = V there are no others and the
# distance is exact; else it is one from below (data processing). Axes: N rows, K tokens, V vocabulary.

TAIL_FLOOR = 1e-6
"""Least share of all others that a logarithm is taken of: 1 - sum p of f32 knows no smaller one."""
LEAST_LOG_P = -100.0
"""In the place of log 0: exp of it is 0 in f32, and 0 times it is no NaN."""


def row_losses(
    draft_logits: jax.Array, ids: jax.Array, log_p: jax.Array, *, kind: str, beta: float, temperature: float
) -> tuple[jax.Array, jax.Array]:
    """The distance of each row, in nats, and what it says of acceptance.

    draft_logits: f32[N, V], at temperature 1. ids: i32[N, K], different ones. log_p: f32[N, K], the target's
    log-probabilities of these at `temperature`, at which the draft's are taken too; NaN makes the row's loss NaN.
    kind: "kl", KL(p || q); "reverse_kl", KL(q || p); "jsd", beta KL(p || m) + (1 - beta) KL(q || m) with
    m = beta p + (1 - beta) q. Returns (loss f32[N], overlap f32[N]): overlap is the sum of min(p, q) over the K tokens,
    the acceptance rate from below. Source: online speculative decoding eq. 3 and 4, and its acceptance rate.
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
    """f32[N, K + 1], or f32[N, V] for K = V. The share of all others is summed from their own scores: 1 - sum q would
    leave nothing of a small one."""
    chosen = jnp.take_along_axis(scores, ids, axis=1)
    if ids.shape[1] < scores.shape[1]:
        rows = jnp.arange(len(ids))[:, None]
        others = jax.nn.logsumexp(scores.at[rows, ids].set(-jnp.inf), axis=1, keepdims=True)
        chosen = jnp.concatenate([chosen, others], axis=1)
    return jax.nn.log_softmax(chosen, axis=1)


def _log_p(log_p: jax.Array, *, has_tail: bool) -> jax.Array:
    """The same categories of the target. Rounded values may add up to more than 1; they are scaled back."""
    log_p = jnp.maximum(log_p.astype(jnp.float32), LEAST_LOG_P)
    total = jnp.exp(log_p).sum(1, keepdims=True)
    if has_tail:
        log_p = jnp.concatenate([log_p, jnp.log(jnp.maximum(1 - total, TAIL_FLOOR))], axis=1)
    return log_p - jnp.log(jnp.maximum(total, 1))


# The draft's scores and distances at the rows of a packed batch: a pure function, to be differentiated.
#
# Axes: T packed tokens, N rows, K tokens of the target per row, V vocabulary.


class BatchArrays(NamedTuple):
    """The arrays of a `Batch`, in its order."""

    tokens: jax.Array
    position: jax.Array
    segment: jax.Array
    at: jax.Array
    ids: jax.Array
    log_p: jax.Array
    weight: jax.Array


def rows_logits(params: Params, config: ModelConfig, fields: BatchArrays) -> jax.Array:
    """f32[N, V]: the draft's scores for the successor of each row's token, texts side by side not seeing each other."""
    hidden = decode(params, config, fields.tokens, fields.position, attend_dense(config, fields.segment))
    return logits(params, config, hidden[:, fields.at])


def batch_sums(
    params: Params, config: ModelConfig, learn: LearnConfig, fields: BatchArrays
) -> tuple[jax.Array, jax.Array]:
    """Weighted sums over the rows of (loss, overlap), f32 each. A row of weight 0 adds exactly 0 to them and to every
    gradient, whatever it holds."""
    real = fields.weight > 0
    log_p = jnp.where(real[:, None], fields.log_p, -jnp.log(fields.log_p.shape[1] + 1.0))
    loss, overlap = row_losses(
        rows_logits(params, config, fields), jnp.where(real[:, None], fields.ids, 0), log_p,
        kind=learn.learn_loss, beta=learn.learn_beta, temperature=learn.learn_temperature,
    )  # fmt: skip
    return (
        jnp.where(real, fields.weight * loss, 0).sum(),
        jnp.where(real, fields.weight * overlap, 0).sum(),
    )


# What of a draft is trained: all its weights, or low-rank updates of its matrices. Pure functions inside
# programs.
#
# Source of the low-rank form: LoRA (Hu et al.), W + A B, with A = 0 at the start so that nothing changes yet.


class LowRank(NamedTuple):
    """a: f32[out, r]; b: f32[r, in]; they stand for the update a @ b of one weight."""

    a: jax.Array
    b: jax.Array


Trained = dict[str, Any]
"""By name of the weight: f32 of its shape, or a LowRank."""


def begin(params: Params, rank: int) -> tuple[Trained, Params]:
    """(what is trained, what it stands on): all weights in f32 and nothing, or for rank > 0 a LowRank for each matrix
    but the embedding, and all weights as they are."""
    if rank == 0:
        return {name: weight.astype(jnp.float32) for name, weight in params.items()}, {}
    names = [name for name, weight in params.items() if _is_updated(name, weight.shape)]
    keys = jax.random.split(jax.random.key(0), len(names))
    trained = {name: _low_rank(params[name].shape, rank, key) for name, key in zip(names, keys, strict=True)}
    return trained, params


def merged(trained: Trained, base: Params, dtype: Any) -> Params:
    """The draft's weights in the type in which it serves."""
    if not base:
        return {name: weight.astype(dtype) for name, weight in trained.items()}
    return {
        name: (weight.astype(jnp.float32) + _product(trained[name])).astype(dtype) if name in trained else weight
        for name, weight in base.items()
    }


def num_trained(config: ModelConfig, rank: int) -> int:
    """Numbers that are trained."""
    shapes = {name: shape for name, (shape, _) in param_specs(config).items()}
    if rank == 0:
        return sum(math.prod(shape) for shape in shapes.values())
    return sum(rank * sum(shape) for name, shape in shapes.items() if _is_updated(name, shape))


def _is_updated(name: str, shape: tuple[int, ...]) -> bool:
    return len(shape) == 2 and name != "embed"


def _low_rank(shape: tuple[int, ...], rank: int, key: jax.Array) -> LowRank:
    outputs, inputs = shape
    return LowRank(
        jnp.zeros((outputs, rank), jnp.float32), jax.random.normal(key, (rank, inputs), jnp.float32) * inputs**-0.5
    )


def _product(update: LowRank) -> jax.Array:
    return jnp.matmul(update.a, update.b, precision=jax.lax.Precision.HIGHEST)


CLIP_NORM = 1.0
"""Most that the norm of a mean gradient may be; a longer one is shortened to it."""
OF_ONE_LENGTH = ("accumulate", "evaluate")
"""Programs that depend on the length of a micro-step."""
TIMED_RUNS = 3
"""Micro-steps of which the median is the measured time."""


class State(NamedTuple):
    """What an optimiser step changes."""

    trained: Trained
    optimiser: Any


class GradientSums(NamedTuple):
    """Over the micro-steps since the last optimiser step: gradients like Trained; loss and weight, f32."""

    gradients: Trained
    loss: jax.Array
    weight: jax.Array


class TrainPrograms:
    """Training a draft of `config` in micro-steps of num_tokens tokens. Programs are in `compiled` once `compile` ran.

    dtype: in which the draft serves, and its products are computed; training keeps f32. device: of jax. counter: counts
    compilations while a program runs. Raises ConfigError on first use of a batch of another shape.
    """

    def __init__(
        self, config: ModelConfig, learn: LearnConfig, num_tokens: int, dtype: Any, device: Any = None,
        counter: CompileCounter | None = None,
    ) -> None:  # fmt: skip
        self.config, self.learn, self.num_tokens = config, learn, num_tokens
        self.dtype = jnp.dtype(dtype)
        self.device = device or jax.local_devices()[0]
        self.top_k = min(learn.learn_top_k, config.vocab_size)
        self.compiled: dict[tuple[Any, ...], Callable] = {}
        self._counter = counter
        self._optimiser = optax.chain(
            optax.clip_by_global_norm(CLIP_NORM), optax.adamw(learn.learn_rate, weight_decay=0.0)
        )

    def compile(self, progress: Progress | None = None, only: Sequence[str] | None = None) -> None:
        """Compile what is not compiled yet, of the programs named or of all; all are then run once too, since a first
        run is slow."""
        declared = [each for each in self._declared() if each.key not in self.compiled]
        self.compiled |= compile_all([each for each in declared if only is None or each.key[0] in only], progress)
        if declared and only is None:
            self._warm_up()

    def with_length(self, num_tokens: int) -> TrainPrograms:
        """The same for another length of micro-steps, with what is compiled already and does not depend on it."""
        other = TrainPrograms(self.config, self.learn, num_tokens, self.dtype, self.device, self._counter)
        other.compiled = {key: each for key, each in self.compiled.items() if key[0] not in OF_ONE_LENGTH}
        return other

    def run(self, name: str, *arguments: Any) -> Any:
        """The result of a program, on the device. What `_declared` donates is used up."""
        with self._counter or contextlib.nullcontext():
            return self.compiled[(name,)](*arguments)

    def fields(self, batch: PackedBatch) -> BatchArrays:
        """A batch as programs take it. Raises ConfigError: it is of another shape than they are compiled for."""
        expected, found = (self.num_tokens, self.top_k), (len(batch.tokens), batch.ids.shape[1])
        if found != expected:
            raise ConfigError(
                f"a batch must have {expected[0]} tokens and {expected[1]} target tokens per row, "
                f"got {found[0]} and {found[1]}; pack records that were made with this learn_top_k"
            )
        return BatchArrays(*batch.arrays)

    def time_micro_step(self) -> float:
        """Seconds of a micro-step, the median of some on weights of its own. Needs "begin" and "accumulate"."""
        state, base, sums = self._begin_with_zeros()
        batch, times = self._row_per_token(), []
        for _ in range(TIMED_RUNS + 1):  # the first one warms up
            start = time.perf_counter()
            sums = jax.block_until_ready(self.run("accumulate", state.trained, base, sums, batch))
            times.append(time.perf_counter() - start)
        return float(np.median(times[1:]))

    def workspace_bytes(self) -> int:
        """What a program takes beside its arguments at most, by the compiler's word: to compute, and for results that
        lie in no argument's place. Those of "begin" are what stays. 0 before anything is compiled."""
        programs = [program for key, program in self.compiled.items() if key != ("begin",)]
        analyses = [program.memory_analysis() for program in programs]  # type: ignore[attr-defined]
        return max(
            (each.temp_size_in_bytes + each.output_size_in_bytes - each.alias_size_in_bytes for each in analyses),
            default=0,
        )

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
        trained, base = begin(params, self.learn.learn_lora_rank)
        trained, base = _copy((trained, base))  # never the arrays that serve: training uses up its own
        return State(trained, self._optimiser.init(trained)), base, _no_sums(trained)

    def _accumulate(self, trained: Trained, base: Params, sums: GradientSums, batch: BatchArrays) -> GradientSums:
        def loss_of(trained: Trained) -> jax.Array:
            return batch_sums(merged(trained, base, self.dtype), self.config, self.learn, batch)[0]

        loss, gradients = jax.value_and_grad(loss_of)(trained)
        gradients = jax.tree.map(jnp.add, sums.gradients, gradients)
        return GradientSums(gradients, sums.loss + loss, sums.weight + batch.weight.sum())

    def _apply(self, state: State, sums: GradientSums, rate_share: jax.Array) -> tuple[State, GradientSums, jax.Array]:
        """Also f32[3]: mean loss, norm of the mean gradient, whether the state changed. rate_share: f32."""
        mean = jax.tree.map(lambda each: each / sums.weight, sums.gradients)
        loss, norm = sums.loss / sums.weight, jnp.sqrt(sum(jnp.sum(each**2) for each in jax.tree.leaves(mean)))
        finite = jnp.isfinite(loss) & jnp.isfinite(norm)

        def updated(state: State) -> State:
            updates, optimiser = self._optimiser.update(mean, state.optimiser, state.trained)
            updates = jax.tree.map(lambda each: each * rate_share, updates)
            return State(optax.apply_updates(state.trained, updates), optimiser)  # type: ignore[arg-type]

        state = jax.lax.cond(finite, updated, lambda state: state, state)
        return state, _no_sums(state.trained), jnp.stack([loss, norm, finite.astype(jnp.float32)])

    def _evaluate(self, trained: Trained, base: Params, batch: BatchArrays) -> jax.Array:
        """f32[3]: sums of overlap and loss, and of the weights."""
        loss, overlap = batch_sums(merged(trained, base, self.dtype), self.config, self.learn, batch)
        return jnp.stack([overlap, loss, batch.weight.sum()])

    def _export(self, trained: Trained, base: Params) -> Params:
        """Arrays of their own: what is trained is used up while they serve."""
        return _copy(merged(trained, base, self.dtype))

    def _declared(self) -> list[Declared]:
        params = self._abstract_params()
        state, base, sums = jax.tree.map(self._on_device, jax.eval_shape(self._begin, params))
        batch = jax.tree.map(self._on_device, self._row_per_token())
        rate_share = self._on_device(jax.ShapeDtypeStruct((), jnp.float32))
        forward = (state.trained, base, batch)
        return [
            Declared(("begin",), jax.jit(self._begin), (params,)),
            Declared(("accumulate",), jax.jit(self._accumulate, donate_argnums=2), (state.trained, base, sums, batch)),
            Declared(("apply",), jax.jit(self._apply, donate_argnums=(0, 1)), (state, sums, rate_share)),
            Declared(("copy",), _in_place(lambda state, old: _copy(state), 1), (state, state)),
            Declared(("evaluate",), jax.jit(self._evaluate), forward),
            Declared(("no_sums",), _in_place(lambda old: _no_sums(old.gradients), 0), (sums,)),
            Declared(("export",), jax.jit(self._export), (state.trained, base)),
        ]

    def _abstract_params(self) -> dict[str, jax.ShapeDtypeStruct]:
        specs = param_specs(self.config)
        return {name: self._on_device(jax.ShapeDtypeStruct(shape, self.dtype)) for name, (shape, _) in specs.items()}

    def _on_device(self, array: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=SingleDeviceSharding(self.device))

    def _row_per_token(self) -> BatchArrays:
        """One text, with a row at each token."""
        count = self.num_tokens
        index = np.arange(count, dtype=np.int32)
        ids = np.broadcast_to(np.arange(self.top_k, dtype=np.int32), (count, self.top_k))
        log_p = np.full((count, self.top_k), -np.log(self.top_k + 1), np.float32)
        weight = np.ones(count, np.float32)
        arrays = (np.zeros_like(index), index, np.zeros_like(index), index, ids, log_p, weight)
        return BatchArrays(*arrays)  # type: ignore[arg-type]


def _copy(arrays: Any) -> Any:
    return jax.tree.map(jnp.copy, arrays)


def _in_place(function: Callable, argument: int) -> Any:
    """Its result lies where that argument did, of which it needs nothing but the place."""
    return jax.jit(function, donate_argnums=argument, keep_unused=True)


def _no_sums(trained: Trained) -> GradientSums:
    return GradientSums(jax.tree.map(jnp.zeros_like, trained), jnp.zeros((), jnp.float32), jnp.zeros((), jnp.float32))
