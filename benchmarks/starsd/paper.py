"""Numbers of StarSD as printed, of its machines, models and requests: Table 1, in rows like `sim.StarRow`,
and the draft's times of sections 5.3 and G."""

from __future__ import annotations

from typing import Any

COLOCATED_TPS = 94.3
"""EAGLE with the draft beside the target."""
COLOCATED_ROUNDS_PER_S = 26.8
"""R_q of the same."""
TARGET_ROUNDS_PER_S = (20.90, 24.07, 23.38, 19.73, 16.64, 14.10)
"""R_p by N."""
TOKEN_MS = (2.24, 1.36, 1.36, 1.42, 1.46, 1.46)
"""t_s by N: with one target the draft is idle 30.6 ms between two drafts, with two 9.8."""
DRAFT_VARIANCE_MS2 = (6.34, 0.30, 0.12)
"""Of the time of a draft, by N (Table 2)."""
PRINTED = (
    (1, 79.9, 86.6, 0.01, 30.6, 20.90, 33.3), (2, 167.6, 100.9, 0.50, 9.8, 49.25, 50.3),
    (3, 246.3, 98.3, 0.60, 3.4, 72.26, 75.4), (4, 266.6, 80.94, 3.90, 0.6, 81.54, 91.4),
    (5, 285.5, 69.49, 13.0, 0.0, 85.52, 99.5), (6, 288.7, 57.78, 22.3, 0.0, 85.84, 99.6),
)  # fmt: skip
"""N, throughput and that of a target in tokens/s, T_wait and T_idle in ms, R_q in rounds/s, load in percent."""


def paper_rows() -> list[dict[str, Any]]:
    """One for each N, in seconds and shares."""
    return [
        {
            "n": n, "throughput_tps": tps, "per_target_tps": each, "wait_s": wait_ms / 1e3, "idle_s": idle_ms / 1e3,
            "rounds_per_s": rounds, "load": percent / 1e2,
        }
        for n, tps, each, wait_ms, idle_ms, rounds, percent in PRINTED
    ]  # fmt: skip
