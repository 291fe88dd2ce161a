"""Open requests of all replicas as a router knows them, in columns that each event updates in place.

A policy that looked at every request of every replica at each arrival would take time in proportion to the cluster;
from the columns it reads only what changed or what it needs. R: replicas; K: places of a replica, taken or free.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(slots=True)
class Assigned:
    """One request as a router knows it. SLOs in seconds, None without one.

    received, first_token_s: tokens streamed so far, and when the first came. While a `Fleet` holds the request its
    columns have them: these fields follow when `fleet[replica]` is read, and are set at the request's end.
    """

    slo_class: str
    prompt_tokens: int
    arrival_s: float
    tpot_slo_s: float | None
    ttft_slo_s: float | None
    received: int = 0
    first_token_s: float | None = None
    e2e_slo_s: float | None = None


FREE = -1
"""Value of `kind` at a free place."""


class Fleet:
    """Open requests of each replica at the end of its last step; `fleet[replica]` lists them in the order of `add`.

    Columns, [R, K]: kind, i64, index of the request's class in `kinds`, or FREE; prompt, received, i64, tokens;
    arrival_s, f64; tpot_s, f64, inf without a target; ttft_s, f64, nan without one; first_s, f64, inf before the first
    token; deadline_s, f64, inf without one.
    open_counts: i64[R], requests. changed: replicas that changed since a policy last cleared it.
    """

    def __init__(self, replicas: int, places: int = 64):
        self.kinds: list[str] = []
        self.open_counts = np.zeros(replicas, np.int64)
        self.kind = np.full((replicas, places), FREE, np.int64)
        self.prompt, self.received = (np.zeros((replicas, places), np.int64) for _ in range(2))
        self.arrival_s, self.tpot_s, self.ttft_s, self.first_s, self.deadline_s = (
            np.zeros((replicas, places)) for _ in range(5)
        )
        self.changed = set(range(replicas))
        self._kind_of: dict[str, int] = {}
        self._open: list[dict[int, Assigned]] = [{} for _ in range(replicas)]
        self._free: list[list[int]] = [list(range(places - 1, -1, -1)) for _ in range(replicas)]

    @classmethod
    def of(cls, replicas: Fleet | Sequence[list[Assigned]]) -> Fleet:
        """Return the requests as a fleet; a fleet is returned unchanged."""
        if isinstance(replicas, Fleet):
            return replicas
        fleet = cls(len(replicas), max(map(len, replicas), default=1) or 1)
        for index, requests in enumerate(replicas):
            for request in requests:
                fleet.add(index, request)
        return fleet

    def __len__(self) -> int:
        return len(self._open)

    def __getitem__(self, index: int) -> list[Assigned]:
        for place, known in self._open[index].items():
            first_s = float(self.first_s[index, place])
            known.received = int(self.received[index, place])
            known.first_token_s = None if first_s == np.inf else first_s
        return list(self._open[index].values())

    def add(self, replica: int, known: Assigned) -> int:
        """Add a request and return its place, which it keeps until it ends."""
        if not self._free[replica]:
            self._grow()
        place = self._free[replica].pop()
        self._open[replica][place] = known
        at = replica, place
        if known.slo_class not in self._kind_of:
            self._kind_of[known.slo_class] = len(self.kinds)
            self.kinds.append(known.slo_class)
        self.kind[at] = self._kind_of[known.slo_class]
        self.prompt[at], self.received[at], self.arrival_s[at] = known.prompt_tokens, known.received, known.arrival_s
        self.tpot_s[at] = np.inf if known.tpot_slo_s is None else known.tpot_slo_s
        self.ttft_s[at] = np.nan if known.ttft_slo_s is None else known.ttft_slo_s
        self.first_s[at] = np.inf if known.first_token_s is None else known.first_token_s
        self.deadline_s[at] = np.inf if known.e2e_slo_s is None else known.arrival_s + known.e2e_slo_s
        self.open_counts[replica] += 1
        self.changed.add(replica)
        return place

    def take(self, replica: int, places: np.ndarray, tokens: np.ndarray, now: float) -> None:
        """Record the tokens (i64[U]) that a step ending at `now` brought to the requests at `places` (i64[U])."""
        self.received[replica, places] += tokens
        self.first_s[replica, places] = np.minimum(self.first_s[replica, places], now)
        self.changed.add(replica)

    def end(self, replica: int, place: int) -> None:
        """Remove a request that has ended."""
        del self._open[replica][place]
        self._free[replica].append(place)
        self.kind[replica, place] = FREE
        self.open_counts[replica] -= 1
        self.changed.add(replica)

    def check_integrity(self) -> None:
        """Check that places, counts and requests agree; for tests."""
        for index, requests in enumerate(self._open):
            taken = set(np.flatnonzero(self.kind[index] != FREE).tolist())
            free = self._free[index]
            assert taken == set(requests) and self.open_counts[index] == len(taken)
            assert taken.isdisjoint(free) and len(taken) + len(set(free)) == self.kind.shape[1] == len(taken) + len(
                free
            )

    def _grow(self) -> None:
        """Double the places of each replica."""
        replicas, places = self.kind.shape
        for name in ("kind", "prompt", "received", "arrival_s", "tpot_s", "ttft_s", "first_s", "deadline_s"):
            column = getattr(self, name)
            more = np.full((replicas, places), FREE if name == "kind" else 0, column.dtype)
            setattr(self, name, np.concatenate([column, more], axis=1))
        for free in self._free:
            free[:0] = range(2 * places - 1, places - 1, -1)
