"""Closed forms of StarSD, sections 3.2 to 4.2, beside those in `star.service.admission`.

All targets are alike, with one request each. docs/equations.md has the corrections.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from adaserve_jax.star.service.admission import ServiceTime, take_turns


def return_s(network_s: float, verify_s: float) -> float:
    """Return Z, the seconds from an answer until the same target asks again. Eq. 6."""
    return network_s + verify_s


def accepted_tokens(chance: float, depth: int) -> float:
    """Return E[l], the accepted tokens of one round: each level with `chance`, if the one before is. Eq. 3."""
    return sum(chance**level for level in range(1, depth + 1))


def emitted_tokens(chance: float, depth: int) -> float:
    """Return the tokens of one round: the accepted ones and the bonus token, which eq. 11 leaves out."""
    return accepted_tokens(chance, depth) + 1.0


def full_targets(service_s: float, back_s: float) -> int:
    """Return N_full, the fewest targets that leave the draft no idle time, one at a time. Eq. 12."""
    return math.ceil(back_s / service_s) + 1


def max_targets(service_s: float, back_s: float, tokens: float, plain_s: float) -> int:
    """Return N_max, the most targets, one at a time, of which none is slower than plain decoding; 0: even one alone is.

    Section 4.2, in closed form. tokens: of one round, `emitted_tokens`; plain_s: seconds per token without a draft.
    """
    alone = back_s + service_s <= tokens * plain_s
    return math.floor(tokens * plain_s / service_s) if alone else 0


@dataclass(frozen=True)
class SteadyState:
    """One column of StarSD's Table 1. batch: mean requests per draft. round_s: T, of one target. wait_s: of a request
    in the queue. idle_s: of the draft between two drafts, as in Table 1; that of eq. 9 is per round. rounds_per_s: R_q,
    requests drafted; target_rounds_per_s: R_p. load: busy share of the draft."""

    targets: int
    batch: float
    round_s: float
    throughput_tps: float
    per_target_tps: float
    wait_s: float
    idle_s: float
    rounds_per_s: float
    target_rounds_per_s: float
    load: float


def steady_state(
    targets: int, service_s: ServiceTime, back_s: float, tokens: float, *, max_rows: int = 1
) -> SteadyState:
    """Return what `admission.take_turns` comes to. back_s: Z. tokens: of one round, `emitted_tokens`."""
    sizes, batches, busy_s, round_s = take_turns(targets, service_s, back_s, max_rows=max_rows)
    served_s = sum(size * service_s(size) for size in sizes) / sum(sizes)
    rate = targets / round_s
    return SteadyState(
        targets=targets,
        batch=targets / batches,
        round_s=round_s,
        throughput_tps=tokens * rate,
        per_target_tps=tokens / round_s,
        wait_s=round_s - back_s - served_s,
        idle_s=(round_s - busy_s) / batches,
        rounds_per_s=rate,
        target_rounds_per_s=1.0 / round_s,
        load=busy_s / round_s,
    )
