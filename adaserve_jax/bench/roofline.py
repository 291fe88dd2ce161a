"""Computes the profile of an engine on a device that is not here, from the device's data sheet.

A step takes as long as the slower of two things: reading weights and context from memory, or the products. Of experts,
only those that a token chose are read, as many as random choices reach. Both at a share of the published rates; with
several devices, their exchanges are added. Nothing of it is measured.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from datetime import UTC, datetime

import jax

import adaserve_jax
from adaserve_jax.bench.profile import propose
from adaserve_jax.models.config import ModelConfig
from adaserve_jax.results.profile import Identity, Profile, ServingFactors, Timings
from adaserve_jax.results.provenance import source_commit
from adaserve_jax.runtime.absent_device import AbsentDevice
from adaserve_jax.runtime.absent_engine import DevicePlan
from adaserve_jax.runtime.sizing import expert_bytes, page_bytes, weight_bytes

CONTEXTS = (256, 1024, 4096)
"""Committed tokens of every row for which times are computed; those beyond the engine's limits are left out."""


@dataclass(frozen=True)
class Assumptions:
    """What the computation assumes beside the data sheet.

    memory_share, compute_share: shares of the published rates that programs reach. exchange_s: latency of one exchange
    between devices. step_s: of a step outside the models: host, dispatch, sampling.
    """

    memory_share: float = 0.8
    compute_share: float = 0.6
    exchange_s: float = 10e-6
    step_s: float = 1e-3


@dataclass(frozen=True)
class Roofline:
    """Times of one model on `ways` devices, each with its part. weights: bytes of a part. products: weights of a part
    that every token is multiplied with, without the head. context_bytes: K and V of one token on one device.
    expert_weights: bytes of the part that are experts'."""

    device: AbsentDevice
    config: ModelConfig
    ways: int
    weights: int
    products: int
    context_bytes: float
    assumed: Assumptions
    expert_weights: int = 0

    def forward_s(self, tokens: int, rows: int, context: int, *, scored: int) -> float:
        """Return the seconds of one forward over `tokens` packed tokens of `rows` rows, each with `context` committed
        tokens, of which `scored` tokens go through the head."""
        config, assumed = self.config, self.assumed
        unread = (1 - self._experts_read(tokens)) * self.expert_weights
        read = self.weights - unread + rows * context * self.context_bytes
        attention = 4 * config.num_layers * config.q_size / self.ways * tokens * context
        head = 2 * scored * config.vocab_size * config.hidden_size / self.ways
        computed = 2 * self.products * tokens + attention + head
        return max(
            read / (assumed.memory_share * self.device.bytes_per_s),
            computed / (assumed.compute_share * self.device.flops_per_s),
        ) + self._exchanges_s(tokens, scored)

    def _experts_read(self, tokens: int) -> float:
        """Return the expected share of experts that any of so many tokens chose."""
        experts = self.config.experts
        return 1.0 if experts is None else 1 - (1 - experts.per_token / experts.count) ** tokens

    def _exchanges_s(self, tokens: int, scored: int) -> float:
        """Return the seconds of two sums per layer, one for the embedding, and the gathering of the scores."""
        if self.ways == 1:
            return 0.0
        exchanges = 2 * self.config.num_layers + 1
        summed = 2 * 4 * tokens * self.config.hidden_size * exchanges  # a sum in f32 goes out and comes back
        gathered = 4 * scored * self.config.vocab_size
        share = (self.ways - 1) / self.ways
        return (exchanges + 1) * self.assumed.exchange_s + share * (summed + gathered) / self.device.link_bytes_per_s


def roofline_of(engine: DevicePlan, config: ModelConfig, *, ways: int, assumed: Assumptions) -> Roofline:
    """Return the roofline of one of the engine's models, divided over so many devices."""
    resolved = engine.resolved
    partition = resolved.placement.partition if ways > 1 else type(resolved.placement.partition)()
    quantize = resolved.config.quantize if config is engine.pair.target else "none"
    weights = weight_bytes(partition.whole(config), resolved.dtype, quantize, partition)
    local = partition.local(config)
    layer = (local.q_size + 2 * local.kv_size) * config.hidden_size + local.q_size * config.hidden_size
    inner = config.num_layers * [local.intermediate_size]
    if config.experts is not None:
        each = config.experts.per_token * config.experts.intermediate_size + config.experts.shared
        each //= partition.ways
        inner = [each if config.experts_of(layer) else local.intermediate_size for layer in range(config.num_layers)]
    products = config.num_layers * layer + 3 * sum(inner) * config.hidden_size
    page = page_bytes(local, resolved.limits.page_size, resolved.dtype, engine.device.platform)
    context = page / resolved.limits.page_size
    experts = expert_bytes(partition.whole(config), resolved.dtype, quantize, partition)
    return Roofline(engine.device, config, ways, weights, products, context, assumed, experts)


def computed_profile(engine: DevicePlan, *, name: str, acceptance: float | None, assumed: Assumptions) -> Profile:
    """Compute the profile of an engine: the times of every bucket by roofline, marked as computed.

    acceptance: chance that the target takes the draft's first choice, which no roofline tells.
    """
    resolved, pair = engine.resolved, engine.pair
    limits = resolved.limits
    target = roofline_of(engine, pair.target, ways=resolved.config.tp, assumed=assumed)
    contexts = [context for context in CONTEXTS if context < limits.max_context] or [limits.max_context // 2]
    verify = {
        (bucket.tokens, bucket.rows, context): target.forward_s(
            bucket.tokens, min(bucket.rows, bucket.tokens), context, scored=bucket.sampled
        )
        for bucket in resolved.verify_buckets.all()
        for context in contexts
    }
    catchup, search = {}, {}
    if pair.draft is not None:
        draft = roofline_of(engine, pair.draft, ways=1, assumed=assumed)
        catchup = {
            (bucket.tokens, bucket.rows, context): draft.forward_s(
                bucket.tokens, min(bucket.rows, bucket.tokens), context, scored=bucket.sampled
            )
            for bucket in resolved.catchup_buckets.all()
            for context in contexts
        }
        search = {
            (rows, width, depth, context): depth * draft.forward_s(rows * width, rows, context, scored=rows * width)
            for rows in resolved.catchup_buckets.row_edges
            for width in resolved.search_widths
            for depth in (1, limits.max_depth)
            for context in contexts
        }
    timings = Timings(contexts[0], 1, verify, catchup, search)
    return Profile(
        name=name or f"{engine.device.name}-{pair.target_folder.name}-tp{resolved.config.tp}",
        made_at=datetime.now(UTC).isoformat(timespec="seconds"),
        commit=source_commit(),
        package_version=adaserve_jax.__version__,
        jax_version=jax.__version__,
        identity=Identity(
            machine=f"computed from the data sheet of {engine.device.title}",
            device=f"{engine.device.name}, {resolved.config.tp} devices",
            target=pair.target_folder.name,
            draft=None if pair.draft_folder is None else pair.draft_folder.name,
            limits=limits,
            settings={"dtype": resolved.config.dtype, "quantize": resolved.config.quantize, "tp": resolved.config.tp},
        ),
        timings=timings,
        baseline_s=target.forward_s(1, 1, contexts[0], scored=1) + assumed.step_s,
        acceptance=acceptance,
        proposal=asdict(propose(timings.samples(), limits, acceptance)),
        serving=ServingFactors(verify=1.0, draft=1.0, overhead_s=assumed.step_s),
        computed=asdict(assumed)
        | {
            "bytes_per_s": engine.device.bytes_per_s,
            "flops_per_s": engine.device.flops_per_s,
            "link_bytes_per_s": engine.device.link_bytes_per_s,
        },
    )
