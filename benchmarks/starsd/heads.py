"""Where should an EAGLE-3 head draft: at its target, or in a draft service? Bytes on the wire and times of a round.

    python -m benchmarks.starsd.heads --out star-heads.json

A draft model needs the tokens alone. A head needs a feature of the target for every token as well, also of the prompt.
In a service these cross the wire, reduced by the target to one layer's width, in bf16 or in int8. Targets have 8
requests each and verify a chain per request. Every draft is accepted alike, so that only its place counts. Times of
forwards are computed from the data sheet of the device, as `adaserve profile --device` does; rounds with a service are
simulated with the service's own core. Nothing is measured.

"deeper" is a head at its target whose chain a draft model in the service makes twice as long.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import jax.numpy as jnp
import typer

from adaserve_jax.bench.roofline import Assumptions, Roofline
from adaserve_jax.models.config import Eagle3Config, ModelConfig
from adaserve_jax.results.provenance import source_commit
from adaserve_jax.runtime.absent_device import AbsentDevice, device_named
from adaserve_jax.runtime.sizing import page_bytes, weight_bytes
from benchmarks import program
from benchmarks.starsd.closed_forms import emitted_tokens
from benchmarks.starsd.sim import StarPlan, simulated_row

BF16 = jnp.dtype(jnp.bfloat16)
LLAMA_8B = ModelConfig(128256, 4096, 14336, 32, 32, 8, 128, 5e5, 1e-5, False, 8192)
LLAMA_70B = ModelConfig(128256, 8192, 28672, 80, 64, 8, 128, 5e5, 1e-5, False, 8192)
LLAMA_1B = ModelConfig(128256, 2048, 8192, 16, 32, 8, 64, 5e5, 1e-5, True, 8192)
PAIRS = {"8B on one device": (LLAMA_8B, 1), "70B on four devices": (LLAMA_70B, 4)}
DRAFT_VOCABULARY = 32000
ROWS, CONTEXT, DEPTH, ACCEPTANCE = 8, 1024, 4, 0.7
TARGETS = (1, 4, 16)
LINKS_GBIT, ROUND_TRIP_S = (10.0, 100.0), 200e-6
FEATURE_BYTES = {"bf16": 2, "int8": 1}
NODE_BYTES, TOKEN_BYTES = 12, 4
"""Of a tree's node: its token, its parent and its score; and of a token of a text."""


@dataclass(frozen=True)
class Place:
    """One way to draft. draft: head or model. place: target, service, or deeper. targets: that share the service.
    round_bytes, prompt_bytes: that cross the wire for one round of all rows, and for one prompt. target_tps: tokens per
    second of one target. load: of the service."""

    pair: str
    draft: str
    place: str
    features: str
    link_gbit: float | None
    targets: int
    round_bytes: int
    prompt_bytes: int
    prompt_s: float
    round_s: float
    target_tps: float
    load: float | None


def roofline(device: AbsentDevice, config: ModelConfig, ways: int) -> Roofline:
    """Return the times of a model that `ways` devices divide evenly."""
    inputs = 2 if config.eagle3 is not None else 1  # a head's attention reads its embedding beside the features
    rows = inputs * (config.q_size + 2 * config.kv_size) + config.q_size + 3 * config.intermediate_size
    products = config.num_layers * rows * config.hidden_size // ways
    context = page_bytes(config, 1, BF16, device.platform) / ways
    return Roofline(device, config, ways, read_bytes(config) // ways, products, context, Assumptions())


def read_bytes(config: ModelConfig) -> int:
    """Return the bytes of weights that a forward reads: all but an embedding that is not the last product too, and of a
    head but what reduces its target's features, which the target does."""
    unread = 0 if config.tie_embeddings else config.vocab_size
    if config.eagle3 is not None:
        unread += config.eagle3.feature_size
    return weight_bytes(config, BF16) - unread * config.hidden_size * BF16.itemsize


def head_of(target: ModelConfig) -> ModelConfig:
    """Return a head as those that are published: one layer of its target's shape, and a smaller vocabulary."""
    eagle = Eagle3Config(target.hidden_size, DRAFT_VOCABULARY, shares_embedding=True)
    return ModelConfig(
        target.vocab_size, target.hidden_size, target.intermediate_size, 1, target.num_heads, target.num_kv_heads,
        target.head_dim, 5e5, 1e-5, False, 8192, eagle3=eagle,
    )  # fmt: skip


def draft_s(drafter: Roofline, rows: int, depth: int) -> float:
    """Return the seconds of a chain of so many levels for so many requests."""
    return depth * drafter.forward_s(rows, rows, CONTEXT, scored=rows)


def places(name: str, target: ModelConfig, ways: int, device: AbsentDevice, rounds: int) -> Iterator[Place]:
    """Yield every way to draft for one target."""
    verifier = roofline(device, target, ways)
    drafters = {"head": roofline(device, head_of(target), 1), "model": roofline(device, LLAMA_1B, 1)}
    fixed_s = verifier.assumed.step_s

    def verify_s(depth: int) -> float:
        return fixed_s + verifier.forward_s(ROWS * (depth + 1), ROWS, CONTEXT, scored=ROWS * (depth + 1))

    tokens = ROWS * emitted_tokens(ACCEPTANCE, DEPTH)
    for draft, drafter in drafters.items():
        round_s = verify_s(DEPTH) + draft_s(drafter, ROWS, DEPTH)
        yield Place(name, draft, "target", "", None, 1, 0, 0, 0.0, round_s, tokens / round_s, None)
    nodes = ROWS * DEPTH * NODE_BYTES
    for draft, features in (("model", ""), *(("head", kind) for kind in FEATURE_BYTES)):
        of_token = TOKEN_BYTES + FEATURE_BYTES.get(features, 0) * target.hidden_size
        round_bytes, prompt_bytes = int(tokens * of_token) + nodes, CONTEXT * of_token
        for gbit in LINKS_GBIT:
            link = gbit * 1e9 / 8
            network_s = ROUND_TRIP_S + round_bytes / link
            for targets in TARGETS:
                plan = StarPlan(targets, verify_s(DEPTH), network_s, ACCEPTANCE, DEPTH, rows=ROWS, rounds=rounds)
                found = simulated_row(plan, lambda rows, draft=draft: draft_s(drafters[draft], rows, DEPTH))  # type: ignore[misc]
                round_s = tokens / found.per_target_tps
                yield Place(
                    name, draft, "service", features, gbit, targets, round_bytes, prompt_bytes, prompt_bytes / link,
                    round_s, found.per_target_tps, found.load,
                )  # fmt: skip
    longer = ROWS * emitted_tokens(ACCEPTANCE, 2 * DEPTH)
    for draft, seconds in (
        ("head", draft_s(drafters["head"], ROWS, 2 * DEPTH)),
        ("head, then model", sum(draft_s(each, ROWS, DEPTH) for each in drafters.values()) + ROUND_TRIP_S),
    ):
        place = "target" if draft == "head" else "deeper"
        round_s = verify_s(2 * DEPTH) + seconds
        yield Place(name, f"{draft}, depth {2 * DEPTH}", place, "", None, 1, 0, 0, 0.0, round_s, longer / round_s, None)


def sizes(name: str, target: ModelConfig, ways: int, device: AbsentDevice) -> dict[str, Any]:
    """Return what a target saves whose head is elsewhere: bytes, as a share of its weights, and as tokens of KV of all
    its devices together."""
    head, whole = read_bytes(head_of(target)), weight_bytes(target, BF16)  # the embedding is its target's
    return {
        "pair": name, "head_bytes": head, "share_of_target": head / whole, "ways": ways,
        "tokens_of_kv": head // page_bytes(target, 1, BF16, device.platform),
    }  # fmt: skip


def star_heads(
    out: Annotated[Path, typer.Option(help="file to write")],
    device: Annotated[str, typer.Option(help="device whose data sheet is taken")] = "h100",
    rounds: Annotated[int, typer.Option(help="rounds of each request, a quarter of them warm-up")] = 200,
) -> None:
    """Compute and simulate."""
    found = device_named(device)
    report = {
        "commit": source_commit(), "device": found.title, "rows": ROWS, "context": CONTEXT, "depth": DEPTH,
        "acceptance": ACCEPTANCE, "round_trip_s": ROUND_TRIP_S, "rounds": rounds,
        "sizes": [sizes(name, *pair, found) for name, pair in PAIRS.items()],
        "places": [asdict(each) for name, pair in PAIRS.items() for each in places(name, *pair, found, rounds)],
    }  # fmt: skip
    out.write_text(json.dumps(report, indent=1, allow_nan=False) + "\n")
    typer.echo(f"{len(report['places'])} places in {out}")


if __name__ == "__main__":
    program.run(star_heads)
