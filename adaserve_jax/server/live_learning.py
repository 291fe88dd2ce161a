"""What the dashboard shows of drafts that learn. Knows no HTTP."""

from __future__ import annotations

from dataclasses import dataclass

from adaserve_jax.stats import LearningStats


@dataclass(frozen=True)
class LearningDraft:
    """One draft that learns. acceptance_rate: accepted / drafted tokens since the start; held_out_acceptance: of the
    version in force, by sum min(p, q); None: nothing of it is known yet."""

    name: str
    version: int
    acceptance_rate: float | None
    held_out_acceptance: float | None
    loss: float | None
    updates: int
    refused: int
    rolled_back: int
    records: int


def learning_drafts(stats: LearningStats) -> list[LearningDraft]:
    """The drafts in the engine's order; none where nothing learns."""
    return [_draft(stats, name, version) for name, version in stats.version.items()]


def _draft(stats: LearningStats, name: str, version: int) -> LearningDraft:
    drafted = stats.drafted_tokens.get(name, 0)
    return LearningDraft(
        name=name, version=version,
        acceptance_rate=round(stats.accepted_tokens.get(name, 0) / drafted, 6) if drafted else None,
        held_out_acceptance=_rounded(stats.held_out_acceptance.get(name)), loss=_rounded(stats.loss.get(name)),
        updates=stats.updates.get(name, 0), refused=stats.refused.get(name, 0),
        rolled_back=stats.rolled_back.get(name, 0), records=stats.records.get(name, 0),
    )  # fmt: skip


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 6)
