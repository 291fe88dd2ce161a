"""The device programs of a step: verification, catch-up of the draft, and beam search.

Programs only read the KV pools. They return the K/V of their tokens, which `pools.commit` writes (see `runtime.pools`).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from adaserve_jax.models.config import ModelConfig
from adaserve_jax.models.decoder import Params, decode, decode_head, logits, medusa_logits, reduce_features
from adaserve_jax.models.layers import TokenAdapters
from adaserve_jax.models.partition import WHOLE, Partition
from adaserve_jax.pallas_kernels.paged_tree_attention.api import Implementation, beam_attention, paged_tree_attention
from adaserve_jax.pallas_kernels.paged_tree_attention.packed import PackedTokens, expand_bits, query_blocks
from adaserve_jax.runtime.compile import Bucket
from adaserve_jax.runtime.pools import InFlight, Pools, page_slots, read_features
from adaserve_jax.runtime.step_layout import Layout, beam_layout, sampler_of, step_layout
from adaserve_jax.runtime.vocabulary_table import VocabularyTable
from adaserve_jax.tree.beam import AcceptanceTable, Beam, BeamForward, beam_search
from adaserve_jax.tree.sampling import DeviceSampling, draw, synthetic_coins
from adaserve_jax.tree.verify import (
    PREFILL,
    Accepted,
    accept_walk,
    ancestor_bits,
    ancestor_paths,
    synthetic_draws,
)


class Forward(NamedTuple):
    """A packed forward's result. hidden: f[d, T]; new_k, new_v: [L, T, K, D]; features: as in `InFlight`."""

    hidden: jax.Array
    new_k: jax.Array
    new_v: jax.Array
    features: jax.Array | None = None


class Root(NamedTuple):
    """Result of a catch-up, from which a search begins: logits f32[R, V] after each row's last token, and with a head
    the feature there, f32[d, R]: an EAGLE-3 head's or an MTP layer's own, the target's for Medusa heads."""

    logits: jax.Array
    feature: jax.Array | None = None


class _BeamCarry(NamedTuple):
    """K and V of a beam search's nodes, [L, R, K, N, D] each, and with an EAGLE-3 head or an MTP layer the newest
    level's features, f32[R, W, d]."""

    k: jax.Array
    v: jax.Array
    feature: jax.Array | None


class VerifyResult(NamedTuple):
    """Result of a verification. outcome: i32, packed for the host (`accept_drawn`); drawn: i32[N], the target's token
    after each sampled position, or with synthetic acceptance the token emitted; logits: f32[N, V], before any edit."""

    outcome: jax.Array
    drawn: jax.Array
    logits: jax.Array


class SampledPositions(NamedTuple):
    """The N positions that a token is drawn after. at: their packed indices; row; position: in the sequence; i32[N]
    each. sampler: the sampling parameters of each."""

    at: jax.Array
    row: jax.Array
    position: jax.Array
    sampler: DeviceSampling


@dataclass(frozen=True)
class ModelPrograms:
    """Programs of one model, as one device runs them.

    config: this device's part of the model. partition: the division over devices. canonical: sum attention in the
    fixed order of the deterministic mode. attention: the kernel implementation. max_adapters: how many the model has
    room for; 0: it has none. feature_layers: layers whose outputs a head reads (`ModelConfig.feature_layers`); empty:
    there is no head. synthetic: chances by depth by which tokens are accepted (`synthetic_draws`); None: by comparison.
    """

    config: ModelConfig
    max_pages: int
    canonical: bool = False
    partition: Partition = WHOLE
    attention: Implementation = "xla"
    max_adapters: int = 0
    feature_layers: tuple[int, ...] = ()
    synthetic: tuple[float, ...] | None = None

    def layout(self, bucket: Bucket) -> Layout:
        """Return the inputs of a packed forward."""
        return step_layout(bucket, self.max_pages, adapted=self.max_adapters > 0)

    def packed_forward(
        self, params: Params, pools: Pools, fields: dict[str, jax.Array], bucket: Bucket,
        feature_pool: jax.Array | None = None,
    ) -> Forward:  # fmt: skip
        """Run the model over packed tokens. fields: those of `step_layout`. feature_pool: the target's
        (`Pools.features`), for a head. Medusa heads only read it, and have no KV."""
        if self.config.medusa is not None:
            assert feature_pool is not None
            no_kv = jnp.zeros((0, bucket.tokens, *pools.k.shape[2::2]), pools.k.dtype)
            hidden = self._target_features(feature_pool, fields, pools.page_size, self.config.hidden_size)
            return Forward(hidden.astype(jnp.float32), no_kv, no_kv)
        tokens = self._packed_tokens(fields, bucket)
        new_k: list[jax.Array] = []
        new_v: list[jax.Array] = []

        def attend(layer: int, q: jax.Array, k: jax.Array, v: jax.Array, sinks: jax.Array | None) -> jax.Array:
            k, v = k.astype(pools.k.dtype), v.astype(pools.v.dtype)
            new_k.append(k.transpose(2, 0, 1))
            new_v.append(v.transpose(2, 0, 1))
            q = self.partition.with_copies(q, k.shape[0])
            if sinks is not None:
                sinks = self.partition.with_copies(sinks, k.shape[0])
            mixed = paged_tree_attention(
                q, k, v, pools.keys, pools.values, layer, tokens, self.config.window_of(layer),
                implementation=self.attention, softcap=self.config.attention_softcap, sinks=sinks,
            )  # fmt: skip
            return self.partition.without_copies(mixed, k.shape[0])

        if feature_pool is not None:
            features = self._target_features(feature_pool, fields, pools.page_size, self.config.target_hidden_size)
            features = reduce_features(params, self.config, features)
            hidden = decode_head(params, self.config, fields["token"], fields["position"], features, attend)
            return Forward(hidden, jnp.stack(new_k), jnp.stack(new_v))
        outputs: dict[int, jax.Array] = {}
        used = fields["row"] < bucket.rows if self.config.experts else None
        adapters = None
        if self.max_adapters:
            slots = jnp.take(fields["adapter"], fields["row"], mode="fill", fill_value=0)  # padding has no row
            adapters = TokenAdapters.of(slots, self.max_adapters)
        hidden = decode(
            params, self.config, fields["token"], fields["position"], attend, self.partition, used, adapters,
            outputs.__setitem__ if self.feature_layers else None,
        )  # fmt: skip
        features = None
        outputs[self.config.num_layers] = hidden
        if self.feature_layers:
            features = jnp.stack([outputs[layer].T[:, None] for layer in self.feature_layers]).astype(pools.k.dtype)
        return Forward(hidden, jnp.stack(new_k), jnp.stack(new_v), features)

    def _target_features(self, pool: jax.Array, fields: dict[str, jax.Array], page_size: int, size: int) -> jax.Array:
        """Return the features of the target at the position of each packed token, f[F * size, T]. size: d of the
        target."""
        row = jnp.minimum(fields["row"], fields["page_table"].shape[0] - 1)
        page = fields["page_table"][row, fields["position"] // page_size]
        return read_features(pool, page, fields["position"] % page_size, size)

    def _packed_tokens(self, fields: dict[str, jax.Array], bucket: Bucket) -> PackedTokens:
        bits = ancestor_bits(fields["parent"])
        blocks = path = None
        if self.canonical:
            path = ancestor_paths(expand_bits(bits, bucket.tokens))
        else:
            blocks = query_blocks(
                fields["count"], fields["row"], num_blocks=bucket.num_blocks, block_size=bucket.block_size
            )
        row = jnp.minimum(fields["row"], bucket.rows - 1)
        return PackedTokens(
            fields["page_table"], fields["ctx_len"], fields["count"], row, fields["position"], bits, blocks, path
        )

    def sampled_logits(self, params: Params, forward: Forward, sampled: jax.Array) -> jax.Array:
        """Return logits f32[N, V] at packed indices `sampled`, i32[N]; indices past the array read its last token."""
        columns = jnp.minimum(sampled, forward.hidden.shape[1] - 1)
        return logits(params, self.config, forward.hidden[:, columns], self.partition)

    def in_flight(self, pools: Pools, fields: dict[str, jax.Array], forward: Forward, keep: jax.Array) -> InFlight:
        """Return the forward's K/V with the page slot of each token to keep. keep: bool[T]."""
        return InFlight(forward.new_k, forward.new_v, *page_slots(fields, keep, pools.page_size), forward.features)

    def verify(
        self, params: Params, pools: Pools, packed: jax.Array, *, bucket: Bucket, max_depth: int
    ) -> tuple[VerifyResult, InFlight]:
        """Run one target step: forward, draw a token after each sampled position, walk the trees."""
        fields = self.layout(bucket).split(packed)
        forward = self.packed_forward(params, pools, fields, bucket)
        scores = self.sampled_logits(params, forward, fields["sampled"])
        positions = sampled_positions(fields, bucket)
        drawn = draw(scores, positions.sampler, positions.position + 1)
        outcome, walk, drawn = accept_drawn(fields, bucket, drawn, max_depth, self.synthetic)
        return VerifyResult(outcome, drawn, scores), self.in_flight(pools, fields, forward, walk.commit)

    def catch_up(
        self, params: Params, pools: Pools, packed: jax.Array, feature_pool: jax.Array | None = None, *, bucket: Bucket
    ) -> tuple[Root, InFlight]:
        """Feed the draft the tokens that its KV lacks. feature_pool: as for `packed_forward`."""
        fields = self.layout(bucket).split(packed)
        forward = self.packed_forward(params, pools, fields, bucket, feature_pool)
        root = Root(self.sampled_logits(params, forward, fields["sampled"]))
        if self.config.is_head:
            root = root._replace(feature=forward.hidden[:, jnp.minimum(fields["sampled"], bucket.tokens - 1)])
        return root, self.in_flight(pools, fields, forward, fields["emit_depth"] == PREFILL)

    def search(
        self, params: Params, pools: Pools, root: Root, packed: jax.Array, table: AcceptanceTable,
        vocabulary: VocabularyTable | None = None, *, max_depth: int, width: int,
    ) -> jax.Array:  # fmt: skip
        """Beam-search from the result of `catch_up`.

        vocabulary: of a draft whose vocabulary differs; the search then is over the target's tokens, whose noise it
        shares. Returns i32[5, R, max_depth, width]: token, parent, cell, and the bits of log f and log q.
        """
        root_logits = root.logits
        rows = root_logits.shape[0]
        fields = beam_layout(rows, self.max_pages).split(packed)
        forward: BeamForward
        carry: _BeamCarry | None = None
        if self.config.medusa is not None:
            assert root.feature is not None
            heads = range(1, max_depth) or (0,)  # a search of one level reads none, but its loop is traced
            by_head = jnp.stack([medusa_logits(params, self.config, head, root.feature) for head in heads])
            forward = partial(_next_head, by_head)
        else:
            shape = (self.config.num_layers, rows, self.config.num_kv_heads, max_depth * width, self.config.head_dim)
            feature = None if root.feature is None else jnp.repeat(root.feature.T[:, None], width, axis=1)
            carry = _BeamCarry(jnp.zeros(shape, pools.k.dtype), jnp.zeros(shape, pools.v.dtype), feature)
            forward = partial(self._beam_forward, params, pools, fields, vocabulary)
        if vocabulary is not None:
            root_logits = vocabulary.scores(root_logits)
        beam: Beam = beam_search(
            root_logits, sampler_of(fields), fields["ctx_len"] - 1, fields["active"] > 0, table, forward, carry,
            fields["shape"][0], fields["shape"][1], fields["shape"][2] > 0, max_depth=max_depth, width=width,
        )  # fmt: skip
        bits = [lax.bitcast_convert_type(part, jnp.int32) for part in (beam.log_f, beam.log_q)]
        return jnp.stack([beam.token, beam.parent, beam.cell, *bits])

    def _beam_forward(
        self, params: Params, pools: Pools, fields: dict[str, jax.Array], vocabulary: VocabularyTable | None,
        carry: _BeamCarry, level: jax.Array, token: jax.Array, position: jax.Array, visible: jax.Array,
    ) -> tuple[jax.Array, _BeamCarry]:  # fmt: skip
        """Run the draft on one level of the beam, N = max_depth * W nodes in all.

        token, position: i32[R, W]; visible: bool[R, W, N]; carry: the tree so far, to which the level is added. Returns
        logits f32[R, W, V] and the carry.
        """
        rows, width = token.shape
        kv_heads, head_dim = self.config.num_kv_heads, self.config.head_dim
        group = self.config.num_heads // kv_heads
        k_buffer, v_buffer, feature = carry
        ctx_len = fields["ctx_len"]
        if feature is not None:  # a head has no entry for position 0
            ctx_len, position = jnp.maximum(ctx_len - 1, 0), jnp.maximum(position - 1, 0)
        key_position = ctx_len[:, None] + jnp.arange(visible.shape[2]) // width

        def attend(layer: int, q: jax.Array, k: jax.Array, v: jax.Array, sinks: jax.Array | None) -> jax.Array:
            nonlocal k_buffer, v_buffer
            start = (layer, 0, 0, level * width, 0)

            def by_row(x: jax.Array) -> jax.Array:
                return x.reshape(kv_heads, head_dim, rows, width).transpose(2, 0, 3, 1).astype(k_buffer.dtype)[None]

            k_buffer = lax.dynamic_update_slice(k_buffer, by_row(k), start)
            v_buffer = lax.dynamic_update_slice(v_buffer, by_row(v), start)
            q_rows = q.reshape(kv_heads, group, head_dim, rows, width).transpose(3, 0, 1, 4, 2)
            window = self.config.window_of(layer)
            seen, first = visible, None
            if window is not None:
                seen = visible & (key_position[:, None, :] > position[:, :, None] - window)
                first = position - window + 1
            mixed = beam_attention(
                q_rows, k_buffer[layer], v_buffer[layer], pools.keys, pools.values, layer, fields["page_table"],
                ctx_len, seen, first, implementation=self.attention, softcap=self.config.attention_softcap, sinks=sinks,
            )  # fmt: skip
            return mixed.transpose(1, 2, 4, 0, 3).reshape(kv_heads * group, head_dim, rows * width).astype(q.dtype)

        fed = token if vocabulary is None else vocabulary.fed(token)
        if feature is None:
            hidden = decode(params, self.config, fed.reshape(-1), position.reshape(-1), attend)
        else:
            # each node's parent is the one it sees on the level above; those of the first level all have the root's
            above = lax.dynamic_slice_in_dim(visible, jnp.maximum(level - 1, 0) * width, width, axis=2)
            before = jnp.take_along_axis(feature, jnp.argmax(above, axis=2)[:, :, None], axis=1)
            before = before.reshape(rows * width, -1).T
            hidden = decode_head(params, self.config, fed.reshape(-1), position.reshape(-1), before, attend)
            feature = hidden.T.reshape(rows, width, -1)
        scores = logits(params, self.config, hidden).reshape(rows, width, -1)
        return scores if vocabulary is None else vocabulary.scores(scores), _BeamCarry(k_buffer, v_buffer, feature)


def _next_head(
    by_head: jax.Array, carry: None, level: jax.Array, token: jax.Array, position: jax.Array, visible: jax.Array
) -> tuple[jax.Array, None]:
    """Return the scores of the children of one level of the beam, f32[R, W, V]: those of the next Medusa head for all
    nodes alike. by_head: f32[levels, R, V], of the second head on; the first has made the first level. The rest is a
    `BeamForward`'s."""
    scores = lax.dynamic_index_in_dim(by_head, level, axis=0, keepdims=False)
    return jnp.broadcast_to(scores[:, None], (*token.shape, scores.shape[-1])), carry


def sampled_positions(fields: dict[str, jax.Array], bucket: Bucket) -> SampledPositions:
    """Return the positions that tokens are drawn after. Unused entries stand for the last packed token."""
    at = jnp.minimum(fields["sampled"], bucket.tokens - 1)
    row = jnp.minimum(fields["row"][at], bucket.rows - 1)
    return SampledPositions(at, row, fields["position"][at], sampler_of(fields).take(row))


def accept_drawn(
    fields: dict[str, jax.Array], bucket: Bucket, drawn: jax.Array, max_depth: int,
    synthetic: tuple[float, ...] | None = None,
) -> tuple[jax.Array, Accepted, jax.Array]:  # fmt: skip
    """Walk the trees with the tokens drawn after the sampled positions, i32[N].

    Returns tokens, counts and accepted, packed for the host one after another in one i32 array (`outcome_sizes`); the
    walk; and `drawn`. synthetic: as in `ModelPrograms`; `drawn` then has the tokens of accepted children.
    """
    everywhere = jnp.zeros(bucket.tokens, jnp.int32).at[fields["sampled"]].set(drawn, mode="drop")
    agrees = None
    if synthetic is not None:
        rows = sampler_of(fields).take(jnp.minimum(fields["row"], bucket.rows - 1))
        coin = synthetic_coins(rows.seed, rows.choice, fields["position"], fields["token"])
        everywhere, agrees = synthetic_draws(
            fields["token"], fields["parent"], fields["emit_depth"], coin, everywhere, synthetic
        )
        drawn = everywhere[jnp.minimum(fields["sampled"], bucket.tokens - 1)]
    walk = accept_walk(
        fields["token"], fields["parent"], fields["emit_depth"], fields["row"], everywhere,
        num_rows=bucket.rows, max_depth=max_depth, agrees=agrees,
    )  # fmt: skip
    outcome = jnp.concatenate([walk.tokens.reshape(-1), walk.counts, walk.accepted.astype(jnp.int32)])
    return outcome, walk, drawn


def outcome_sizes(bucket: Bucket, max_depth: int) -> tuple[int, int, int]:
    """Return the lengths of the parts of a packed outcome: tokens R * (max_depth + 1), counts R, accepted T."""
    return bucket.rows * (max_depth + 1), bucket.rows, bucket.tokens
