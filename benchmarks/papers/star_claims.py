"""What StarSD states of its table 1 and figures 4 to 6, each as a number and a line."""

from __future__ import annotations

from math import sqrt

from benchmarks.papers.entry import Claim
from benchmarks.starsd.paper import (
    COLOCATED_ROUNDS_PER_S,
    COLOCATED_TPS,
    DRAFT_VARIANCE_MS2,
    TARGET_ROUNDS_PER_S,
    TOKEN_MS,
    paper_rows,
)

PAPER = {row["n"]: row for row in paper_rows()}
"""Table 1 as printed, by targets."""
ONE, FULL, MOST = 1, 3, 6
"""Targets: one alone, where the paper's draft is nearly full, and all."""


def _paper(name: str, n: int, of: int) -> float:
    return PAPER[n][name] / PAPER[of][name]


TABLE_CLAIMS = (
    Claim("tokens/s of six targets over one", "tokens: six over one", "at least", 1.0,
          _paper("throughput_tps", MOST, ONE)),
    Claim("tokens/s of three targets over one with the draft beside it", "tokens: three over colocated", "at least",
          1.0, PAPER[FULL]["throughput_tps"] / COLOCATED_TPS),
    Claim("tokens/s of a target: six over one", "of a target: six over one", "at most", 1.0,
          _paper("per_target_tps", MOST, ONE)),
    Claim("load of the draft with six targets", "load: six", "at least", 0.95, PAPER[MOST]["load"], "share"),
    Claim("idle between two drafts with six targets", "idle: six", "at most", 1.0, PAPER[MOST]["idle_s"] * 1e3, "ms"),
)  # fmt: skip
ENGINE_CLAIMS = (
    Claim("tokens/s of two targets over one", "tokens: two over one", "at least", 1.0, _paper("throughput_tps", 2, 1)),
    Claim("tokens/s of a target with an EAGLE head of its own over one at the service", "tokens: head over service",
          "at least", 1.0, COLOCATED_TPS / PAPER[ONE]["throughput_tps"]),
    Claim("tokens/s of two targets over one with an EAGLE head of its own", "tokens: two over head", "at least", 1.0,
          PAPER[2]["throughput_tps"] / COLOCATED_TPS),
    Claim("texts that equal what the target writes alone", "same texts", "at least", 1.0, None, "share"),
)  # fmt: skip
ROUND_CLAIMS = (
    Claim("rounds/s of the draft: three targets over one", "draft: three over one", "at least", 1.5,
          _paper("rounds_per_s", FULL, ONE)),
    Claim("rounds/s of the draft: six targets over four", "draft: six over four", "at most", 1.15,
          _paper("rounds_per_s", MOST, 4)),
    Claim("rounds/s of a target: two targets over one", "target: two over one", "at least", 0.9,
          TARGET_ROUNDS_PER_S[1] / TARGET_ROUNDS_PER_S[0]),
    Claim("rounds/s of a target: six targets over three", "target: six over three", "at most", 0.9,
          TARGET_ROUNDS_PER_S[5] / TARGET_ROUNDS_PER_S[2]),
    Claim("load of the draft with four targets", "load: four", "at least", 0.9, PAPER[4]["load"], "share"),
)  # fmt: skip
APART_CLAIMS = (
    Claim("tokens/s apart over together, mean", "tokens: apart over together", "at most", 1.0,
          PAPER[ONE]["throughput_tps"] / COLOCATED_TPS),
    Claim("rounds/s apart over together, mean", "rounds: apart over together", "at most", 1.0,
          PAPER[ONE]["rounds_per_s"] / COLOCATED_ROUNDS_PER_S),
    Claim("rounds/s fluctuate less than tokens/s, apart", "fluctuation: rounds over tokens", "at most", 1.0),
)  # fmt: skip
IDLE_CLAIMS = (
    Claim("time of a token after 30 ms idle over that without", "token: idle over steady", "at least", 1.0,
          TOKEN_MS[0] / TOKEN_MS[1]),
    Claim("standard deviation after 30 ms idle over that without", "deviation: idle over steady", "at least", 1.0,
          sqrt(DRAFT_VARIANCE_MS2[0] / DRAFT_VARIANCE_MS2[1])),
    Claim("time of a token after 30 ms idle: warmed up over not", "token: warm over cold", "at most", 1.0),
)  # fmt: skip
