"""What request records are summed up from, as columns: about 130 bytes a request where its record takes 1,000.

For runs of so many requests that their records are not to be kept. N: requests.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, get_args

import numpy as np

from adaserve_jax.results.records import RequestRecord, Status

STATUSES: tuple[Status, ...] = get_args(Status)
TIMES = ("due_s", "late_s", "queue_s", "ttft_s", "tpot_s", "tpot_paper_s", "tpot_slo_s", "ttft_slo_s")
"""f64, nan where a record has None."""
COUNTS = ("prompt_tokens", "output_tokens", "verify_steps", "drafted_tokens", "accepted_tokens", "preemptions")
OUTCOMES = ("tpot_met", "ttft_met", "slo_met", "slo_feasible", "tpot_paper_met")
"""i8: 1, 0, or UNKNOWN where a record has None."""
UNKNOWN = -1
ROW = np.dtype(
    [("slo_class", "i4"), ("status", "i1"), ("late_tokens", "i4"), ("gaps", "i4")]
    + [(name, "f8") for name in TIMES] + [(name, "i8") for name in COUNTS] + [(name, "i1") for name in OUTCOMES]
)  # fmt: skip


class RecordColumns:
    """Records, added one by one, of which only columns are kept; times of tokens stay as they are where there are any.

    classes: in the order in which they came. rows: ROW[N], slo_class an index of `classes`, status one of STATUSES;
    late_tokens as of the record; gaps: tokens after the first whose times are known.
    """

    def __init__(self, records: Iterable[RequestRecord] = ()):
        self.classes: list[str] = []
        self._class_of: dict[str, int] = {}
        self._rows: np.ndarray = np.zeros(256, ROW)
        self._count = 0
        self._offsets_s: dict[int, tuple[float, ...]] = {}
        for record in records:
            self.add(record)

    def __len__(self) -> int:
        return self._count

    @property
    def rows(self) -> np.ndarray:
        return self._rows[: self._count]

    def add(self, record: RequestRecord) -> None:
        if self._count == len(self._rows):
            self._rows = np.concatenate([self._rows, np.zeros_like(self._rows)])
        kind = self._class_of.get(record.slo_class)
        if kind is None:
            kind = self._class_of[record.slo_class] = len(self.classes)
            self.classes.append(record.slo_class)
        timed = len(record.token_offsets_s)
        if timed > 1:
            self._offsets_s[self._count] = record.token_offsets_s
        self._rows[self._count] = (
            kind, STATUSES.index(record.status), record.late_tokens, max(timed - 1, 0),
            *(_number(getattr(record, name), np.nan) for name in TIMES),
            *(getattr(record, name) for name in COUNTS),
            *(_number(getattr(record, name), UNKNOWN) for name in OUTCOMES),
        )  # fmt: skip
        self._count += 1

    def gaps_s(self, chosen: np.ndarray) -> np.ndarray:
        """f64, times between successive tokens of each chosen request (bool[N]); 0 between tokens of one step."""
        of = [np.diff(np.asarray(offsets_s)) for row, offsets_s in self._offsets_s.items() if chosen[row]]
        return np.concatenate(of) if of else np.zeros(0)

    def record(self, row: int) -> RequestRecord:
        """A record with what is kept of it; its names and the times of its tokens are empty."""
        at: dict[str, Any] = dict(zip(ROW.names or (), self._rows[row].item(), strict=True))
        values: dict[str, Any] = {name: None if np.isnan(at[name]) else float(at[name]) for name in TIMES}
        values |= {name: int(at[name]) for name in COUNTS}
        values |= {name: None if at[name] == UNKNOWN else bool(at[name]) for name in OUTCOMES}
        return RequestRecord(
            run_id="", policy="", rate_rps=0.0, request_id="", slo_class=self.classes[int(at["slo_class"])],
            status=STATUSES[int(at["status"])], error_code=None, token_offsets_s=(), **values,
        )  # fmt: skip


def _number(value: float | None, missing: float) -> float:
    return missing if value is None else value
