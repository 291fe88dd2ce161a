"""benchmarks/engine/acceptance_rules.py: its three rules against closed forms and counted draws."""

from __future__ import annotations

import itertools
import json
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.bench.scripts import imported
from tests.conftest import ROOT

RESULT = ROOT / "benchmarks" / "results" / "acceptance-rules-demo-cpu.json"
P = np.array([[0.5, 0.3, 0.1, 0.1], [0.25, 0.25, 0.25, 0.25], [0.9, 0.05, 0.03, 0.02]])
Q = np.array([[0.2, 0.5, 0.2, 0.1], [0.7, 0.1, 0.1, 0.1], [0.88, 0.06, 0.03, 0.03]])
DRAWS = 20_000


def drawn(children: int) -> np.ndarray:
    noise = jax.random.gumbel(jax.random.key(0), (DRAWS, children, P.shape[1]))
    with imported("engine.acceptance_rules") as found:
        share = found["acceptance_rules"].drawn_acceptance(jnp.log(P), jnp.log(Q), noise, children)
    return np.asarray(share)


def test_one_child_is_accepted_as_the_coupling_s_closed_form_says() -> None:
    """Daliri et al.: sum over tokens of 1 / sum_j max(p_j / p_i, q_j / q_i). With one draft, gls is the same rule."""
    ratios = np.maximum(P[:, None, :] / P[:, :, None], Q[:, None, :] / Q[:, :, None])
    expected = (1 / ratios.sum(2)).sum(1)
    coupled, listed = drawn(1)
    assert coupled == pytest.approx(expected, abs=0.01)
    assert (coupled == listed).all()


def test_the_coupled_children_hold_the_token_as_often_as_orders_of_arrival_say() -> None:
    """With all but one token proposed, the target's is missing when it comes last for the draft: counted by the times
    at which exponential clocks of rates p and q ring, which is what Gumbel noise is."""
    rng = np.random.default_rng(1)
    clocks = rng.exponential(size=(DRAWS, 1, P.shape[1]))
    target, last = (clocks / P).argmin(2), (clocks / Q).argmax(2)
    assert drawn(3)[0] == pytest.approx((target != last).mean(0), abs=0.01)


def test_gls_lets_the_target_draw_by_the_first_of_all_clocks() -> None:
    rng = np.random.default_rng(2)
    clocks = rng.exponential(size=(DRAWS, 2, 1, P.shape[1]))
    target = (clocks.min(1) / P).argmin(2)
    drafts = (clocks / Q).argmin(3)
    assert drawn(2)[1] == pytest.approx((drafts == target[:, None]).any(1).mean(0), abs=0.01)


def test_rejection_is_what_every_pair_of_draws_gives() -> None:
    """Two draws from q, in exact arithmetic, one token after another."""
    expected = []
    for p_row, q_row in zip(P, Q, strict=True):
        p, q = ([Fraction(x).limit_denominator(1000) for x in row] for row in (p_row, q_row))
        left = [max(a - b, Fraction(0)) for a, b in zip(p, q, strict=True)]
        after = [x / sum(left) for x in left]
        total = Fraction(0)
        for first, second in itertools.product(range(len(q)), repeat=2):
            kept = min(Fraction(1), p[first] / q[first])
            again = min(Fraction(1), after[second] / q[second])
            total += q[first] * q[second] * (kept + (1 - kept) * again)
        expected.append(float(total))
    with imported("engine.acceptance_rules") as found:
        chance = found["acceptance_rules"].rejection_acceptance(np.log(P), np.log(Q), 2)
    assert chance == pytest.approx(expected)


def test_equal_models_are_always_accepted() -> None:
    with imported("engine.acceptance_rules") as found:
        assert found["acceptance_rules"].rejection_acceptance(np.log(P), np.log(P), 3) == pytest.approx([1, 1, 1])


def test_the_committed_run_has_every_rule_and_more_children_help() -> None:
    points = json.loads(RESULT.read_text())["points"]
    by_rule: dict[tuple[str, float], list[float]] = {}
    for point in sorted(points, key=lambda each: each["children"]):
        assert point["low"] <= point["acceptance"] <= point["high"]
        by_rule.setdefault((point["rule"], point["temperature"]), []).append(point["acceptance"])
    assert {rule for rule, _ in by_rule} == {"coupled", "gls", "rejection"}
    assert all(values == sorted(values) for values in by_rule.values())
