"""Whether one target more may use a draft service: not where it, or one that is there, were slower than without.

Pure. Knows targets by their times only; sessions and devices are others'. Source: StarSD, section 4.2.
"""

from __future__ import annotations

from dataclasses import dataclass

from adaserve_jax.star.formulas import max_targets_batched, measured, rounds

RATE = 0.1
"""Weight of a new measurement in its moving average."""
FEWEST = 16
"""Drafts, and rounds verified, after which averages are believed."""


@dataclass
class _Times:
    """Of one target. plain_s, verify_s: as its Hello said, 0: not known. back_s: Z as measured, back_seen times."""

    plain_s: float
    verify_s: float
    back_s: float = 0.0
    back_seen: int = 0

    @property
    def return_s(self) -> float:
        """Z: measured, else as said."""
        return self.back_s if self.back_seen >= FEWEST else self.verify_s


class Admission:
    """Learns S(n), Z and E[l] + 1 from what is served, and judges who asks to come. max_rows: most requests at once.

    A round of a target is taken as one request: that is the paper's, and right where a target has one request; where it
    has several the average batch it takes part in is what counts, since S is measured on batches as they were.
    """

    def __init__(self, max_rows: int):
        self._max_rows = max_rows
        self._service_s: dict[int, float] = {}
        self._served = 0
        self._tokens = 0.0
        self._verified = 0
        self._targets: dict[str, _Times] = {}

    @property
    def service_s(self) -> dict[int, float]:
        """S by rows, moving averages."""
        return dict(self._service_s)

    @property
    def tokens(self) -> float:
        """E[l] + 1, moving average; 0.0: not known."""
        return self._tokens if self._verified >= FEWEST else 0.0

    def served(self, rows: int, seconds: float) -> None:
        """A search of so many rows took so long, catch-up included."""
        before = self._service_s.get(rows, seconds)
        self._service_s[rows] = before + RATE * (seconds - before)
        self._served += 1

    def verified(self, target_id: str, tokens: int, seconds: float) -> None:
        """A target emitted so many tokens with a tree, and asked again after so many seconds."""
        self._verified += 1
        self._tokens += (tokens - self._tokens) * max(RATE, 1.0 / self._verified)
        times = self._targets.get(target_id)
        if times is not None:
            times.back_seen += 1
            times.back_s += (seconds - times.back_s) * max(RATE, 1.0 / times.back_seen)

    def leave(self, target_id: str) -> None:
        """A target is gone; unknown ones are ignored."""
        self._targets.pop(target_id, None)

    def admit(self, target_id: str, *, plain_s: float, verify_s: float) -> str:
        """Admit it: "", or why not, and it is not admitted. plain_s, verify_s: of its Hello. Who is there already
        stays; what is not known yet keeps nobody out."""
        there = self._targets.get(target_id)
        if there is not None:
            there.plain_s, there.verify_s = plain_s, verify_s
            return ""
        coming = _Times(plain_s, verify_s)
        why = self._why_not(coming)
        if not why:
            self._targets[target_id] = coming
        return why

    def _why_not(self, coming: _Times) -> str:
        if self._served < FEWEST or not self.tokens:
            return ""
        service_s, now = measured(self._service_s), len(self._targets)
        for times, is_new in ((coming, True), *((times, False) for times in self._targets.values())):
            if not times.plain_s or not times.return_s:
                continue
            back_s, plain_tps = times.return_s, 1.0 / times.plain_s
            would = rounds(now + 1, service_s, back_s, self.tokens, max_rows=self._max_rows).per_target_tps
            if would >= plain_tps:
                continue
            does = rounds(max(now, 1), service_s, back_s, self.tokens, max_rows=self._max_rows).per_target_tps
            if not is_new and does < plain_tps:
                continue  # it is no worse off than it is
            most = max_targets_batched(service_s, back_s, self.tokens, times.plain_s, max_rows=self._max_rows)
            whose = "this target" if is_new else "a target that is here"
            return (
                f"{now} targets are served, the most that pay are {most}: with one more, {whose} would get "
                f"{would:.1f} tokens/s with drafts of {1e3 * service_s(1):.2f} ms, and has {plain_tps:.1f} tokens/s by "
                "plain decoding; decode without this service, or start another"
            )
        return ""
