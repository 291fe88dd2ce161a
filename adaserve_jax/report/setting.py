"""What load a point had: the axes along which a run varies it, and how their values are written."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from adaserve_jax.results.schema import ResultRow

AXES = {
    "rate_rps": ("rate", "{:.4g}/s"),
    "urgent_share": ("urgent share", "{:.0%}"),
    "slo_scale": ("target scale", "{:g}"),
    "burstiness": ("burstiness", "{:g}"),
    "process": ("arrivals", "{}"),
    "workload": ("workload", "{}"),
}
"""By column: what people call it, and how a value is written."""
AXIS_LABELS = {
    "rate_rps": "requests per second", "urgent_share": "share of urgent requests",
    "slo_scale": "factor of all TPOT targets",
    "burstiness": "coefficient of variation of the gaps between arrivals",
}  # fmt: skip
"""Of those that are numbers, along which curves are drawn."""


@dataclass(frozen=True)
class Setting:
    """None: not varied in its run. workload: empty unless another one was measured at the same setting."""

    process: str
    rate_rps: float
    urgent_share: float | None
    slo_scale: float | None
    burstiness: float | None
    workload: str = ""

    @classmethod
    def of(cls, row: ResultRow) -> Setting:
        """Rows from before burstiness was noted have that of their process."""
        burstiness = 1.0 if row.burstiness is None and row.arrival_process == "poisson" else row.burstiness
        return cls(row.arrival_process, row.rate_rps, row.urgent_share, row.slo_scale, burstiness)

    @property
    def order(self) -> tuple[float | str, ...]:
        """Settings sort by it: rate first."""
        return (*(self.number(axis) for axis in AXIS_LABELS), self.process, self.workload)

    def value(self, axis: str) -> float | str | None:
        """None where it was not varied."""
        return getattr(self, axis) or None if axis == "workload" else getattr(self, axis)

    def number(self, axis: str) -> float:
        """The value of one of `AXIS_LABELS`, -1 where it was not varied."""
        value = getattr(self, axis)
        return -1.0 if value is None else value

    def cell(self, axis: str) -> str:
        """The value as a table shows it: "2/s", "60%"."""
        value = self.value(axis)
        return "-" if value is None else AXES[axis][1].format(value)

    def describe(self, axes: Iterable[str]) -> str:
        """E.g. "2/s, urgent share 60%"; of the axes that are given and known."""
        known = (axis for axis in axes if self.value(axis) is not None)
        return ", ".join(self.cell(a) if a == "rate_rps" else f"{AXES[a][0]} {self.cell(a)}" for a in known)

    def but(self, axis: str) -> tuple[object, ...]:
        """All of it but one axis. Arrivals of one burstiness have a process of that name, which varies with it."""
        left_out = ("burstiness", "process") if axis == "burstiness" else (axis,)
        return tuple(self.value(other) for other in AXES if other not in left_out)
