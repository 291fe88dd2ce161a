"""A measured profile as a machine to simulate: its times by tokens, rows and context, and its own limits.

Imports no jax.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from adaserve_jax.bench.machines import Machine
from adaserve_jax.errors import ConfigError
from adaserve_jax.results.profile import Profile, parse_profile
from adaserve_jax.scheduler.prediction import ServingFactors
from adaserve_jax.types import CostSamples, Limits, scaled_samples

CLASS = "default"


@dataclass(frozen=True)
class ProfiledMachine(Machine):
    """verify_ms and draft_level_ms are of one row at the typical context, for reading; steps cost what `costs` say."""

    measured_limits: Limits
    costs: CostSamples
    measured_baseline_s: float
    searched_offsets: tuple[int, int]
    serving: ServingFactors

    @classmethod
    def of(cls, profile: Profile, where: str) -> ProfiledMachine:
        """Raises ConfigError: the profile has no acceptance, or none of a draft."""
        limits, costs = profile.identity.limits, profile.timings.samples()
        if profile.acceptance is None and limits.max_depth:
            raise ConfigError(
                f"profile {where} has no acceptance, which a simulation draws from; measure it with `adaserve profile "
                "--check-seconds`, or give it there as --acceptance"
            )
        rows = min(rows for _, rows in costs.verify_s)
        levels = [seconds for _, seconds in sorted(costs.draft_level_s.items())]
        return cls(
            name=profile.name,
            about=f"{profile.identity.machine}; {profile.identity.device}, measured {profile.made_at}",
            verify_ms={tokens: s * 1e3 for (tokens, r), s in costs.verify_s.items() if r == rows},
            draft_level_ms=levels[0] * 1e3 if levels else 0.0,
            max_depth=limits.max_depth,
            max_width=limits.max_width,
            max_requests=limits.max_requests,
            max_tree_tokens=limits.max_tree_tokens,
            max_batch_tokens=limits.max_tokens,
            token_step=0,
            max_context=limits.max_context,
            acceptance={CLASS: profile.acceptance or 0.5},  # without a draft nothing is drawn
            measured_limits=limits,
            costs=costs,
            measured_baseline_s=profile.baseline_s,
            searched_offsets=(profile.c1 or 0, profile.c2 or 0),
            serving=ServingFactors(**profile.serving or {}),
        )

    @property
    def baseline_s(self) -> float:
        """As it was measured, through the whole step."""
        return self.measured_baseline_s

    @property
    def offsets(self) -> tuple[int, int]:
        """As the profile has them."""
        return self.searched_offsets

    def limits(self, max_requests: int = 0) -> Limits:
        """max_requests: 0 for the machine's own; never more than it was measured with."""
        own = self.measured_limits
        return replace(own, max_requests=min(max_requests or own.max_requests, own.max_requests))

    def samples(self, limits: Limits) -> CostSamples:
        """As measured, times what serving adds; limits: of this machine."""
        return scaled_samples(self.costs, verify=self.serving.verify, draft=self.serving.draft)

    @property
    def overhead_s(self) -> float:
        """As it was measured while serving."""
        return self.serving.overhead_s


def profiled_machine(values: Any, where: str) -> ProfiledMachine:
    """From parsed JSON. Raises ConfigError saying what is wrong with it."""
    return ProfiledMachine.of(parse_profile(values, where), where)
