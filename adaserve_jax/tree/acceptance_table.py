"""The acceptance table on the host, and its file: chances that the target accepts a drafted token, by cell.

The file is calibration.json beside a pair of models, or one that an engine learned. A learned one also holds the counts
of each cell, so that learning continues where it stopped.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from adaserve_jax.errors import CheckpointError
from adaserve_jax.results.whole_file import PRIVATE, write_whole

VERSION = 1
MODES = ("greedy", "coupled")
"""First axis of a table, and the sections of its file."""
SMALLEST = 1e-4
"""Smallest chance that a child is given."""
_DIGITS = 6


@dataclass(frozen=True, eq=False)
class Learned:
    """Counts that a table was fitted from, f64[2, D, ranks, bins] each. prior: chances before any count. outcomes,
    accepted: decayed counts of nodes verified after an accepted parent, and of those accepted."""

    prior: np.ndarray
    outcomes: np.ndarray
    accepted: np.ndarray


@dataclass(frozen=True, eq=False)
class ChanceTable:
    """chance: f32[2, D, ranks, bins] in [0, 1], first axis as MODES. edges: f32[2, bins - 1], increasing, inf where a
    mode has fewer bins than the other. learned: None for a table that was fitted offline."""

    chance: np.ndarray
    edges: np.ndarray
    learned: Learned | None = None


def log_chances(chance: np.ndarray) -> np.ndarray:
    """Return natural logs of chances in [0, 1], f32 of the same shape."""
    return np.log(np.maximum(chance, SMALLEST)).astype(np.float32)


def read_chances(path: Path) -> ChanceTable:
    """Read a table. Raises CheckpointError: the file is missing or not a table."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: cannot read the acceptance table ({error})") from error
    if not isinstance(data, dict) or data.get("version") != VERSION:
        found = data.get("version") if isinstance(data, dict) else type(data).__name__
        raise CheckpointError(f"{path}: expected an acceptance table of version {VERSION}, got {found!r}")
    sections = [_Section.read(data, name, path) for name in MODES]
    depth, ranks, bins = np.max([section.table.shape for section in sections], axis=0).tolist()
    shape = (depth, ranks, bins)
    edges = np.full((2, bins - 1), np.inf, np.float32)
    for mode, section in enumerate(sections):
        edges[mode, : len(section.edges)] = section.edges
    chance = np.stack([_grown(section.table, shape, "edge") for section in sections])
    learned = None
    if all(section.counts is not None for section in sections):
        modes = ("edge", "constant", "constant")
        parts = [
            np.stack([_grown(section.counts[part], shape, mode) for section in sections if section.counts is not None])
            for part, mode in enumerate(modes)
        ]
        learned = Learned(*parts)
    return ChanceTable(chance.astype(np.float32), edges, learned)


def write_chances(path: Path, table: ChanceTable) -> None:
    """Write a table atomically: a reader sees the old file or the new one. Raises OSError."""
    text = json.dumps({"version": VERSION} | {name: _section(table, mode) for mode, name in enumerate(MODES)})
    write_whole(path, text + "\n", mode=PRIVATE)


@dataclass(frozen=True, eq=False)
class _Section:
    """One mode of a file. edges: [E]; table: [D, ranks, E + 1]; counts: prior, outcomes and accepted of that shape, or
    None."""

    edges: np.ndarray
    table: np.ndarray
    counts: tuple[np.ndarray, np.ndarray, np.ndarray] | None

    @classmethod
    def read(cls, data: dict[str, Any], name: str, source: Path) -> _Section:
        try:
            section = data[name]
            edges, table = (np.asarray(section[part], np.float64) for part in ("edges", "table"))
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(
                f"{source}: section {name!r} must hold numeric 'edges' and 'table' ({error})"
            ) from error
        fits = table.ndim == 3 and edges.ndim == 1 and table.size and table.shape[2] == len(edges) + 1
        if not fits or not np.isfinite(edges).all() or (np.diff(edges) <= 0).any() or not _are_chances(table):
            raise CheckpointError(
                f"{source}: section {name!r} must hold increasing edges [E] and chances [depth, rank, E + 1] in "
                f"[0, 1], got shapes {edges.shape} and {table.shape}"
            )
        return cls(edges, table, None if "learned" not in section else _counts(section["learned"], table, name, source))


def _counts(learned: Any, table: np.ndarray, name: str, source: Path) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    try:
        prior, outcomes, accepted = (
            np.asarray(learned[part], np.float64) for part in ("prior", "outcomes", "accepted")
        )
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"{source}: 'learned' of section {name!r} must hold numeric 'prior', 'outcomes' and 'accepted' ({error})"
        ) from error
    shapes = {prior.shape, outcomes.shape, accepted.shape}
    slack = 10.0**-_DIGITS
    if shapes != {table.shape} or not _are_chances(prior) or not np.isfinite(outcomes).all():
        raise CheckpointError(
            f"{source}: 'learned' of section {name!r} must hold chances and finite counts of the table's shape "
            f"{table.shape}, got shapes {prior.shape}, {outcomes.shape} and {accepted.shape}; delete the file to "
            "start anew"
        )
    if not ((accepted >= 0) & (accepted <= outcomes + slack)).all():
        raise CheckpointError(
            f"{source}: 'learned' of section {name!r} must count from 0 to 'outcomes' as accepted; delete the file to "
            "start anew"
        )
    return prior, outcomes, np.minimum(accepted, outcomes)


def _are_chances(table: np.ndarray) -> bool:
    return bool(((table >= 0) & (table <= 1)).all())


def _grown(part: np.ndarray, shape: tuple[int, ...], mode: Any) -> np.ndarray:
    return np.pad(part, [(0, wanted - own) for wanted, own in zip(shape, part.shape, strict=True)], mode)


def _section(table: ChanceTable, mode: int) -> dict[str, Any]:
    edges = table.edges[mode][np.isfinite(table.edges[mode])]
    bins = len(edges) + 1

    def numbers(part: np.ndarray) -> list[Any]:
        return part[mode, :, :, :bins].astype(np.float64).round(_DIGITS).tolist()

    section: dict[str, Any] = {
        "edges": edges.astype(np.float64).tolist(),  # rounded, two that are near would become one
        "table": numbers(table.chance),
    }
    if table.learned is not None:
        parts = ("prior", "outcomes", "accepted")
        section["learned"] = {part: numbers(getattr(table.learned, part)) for part in parts}
    return section
