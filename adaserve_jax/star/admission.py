"""Whether one target more may use a draft service: not where it, or one that is there, were slower than without.

No thread, clock or device. Knows targets by their times only; sessions are others'. Source: StarSD, section 4.2.
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

    The paper's targets have one request each. Here they have several, on average as many as those that are there: all
    requests share the draft alike, and plain decoding too gives each request of a target a token per step.
    """

    def __init__(self, max_rows: int):
        self._max_rows = max_rows
        self._service_s: dict[int, float] = {}
        self._served = 0
        self._tokens = 0.0
        self._verified = 0
        self._targets: dict[str, _Times] = {}

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

    def admit(self, target_id: str, *, plain_s: float, verify_s: float, requests: int = 0) -> str:
        """Admit it: "", or why not, and it is not admitted. plain_s, verify_s: of its Hello; requests: that the targets
        which are there have now. Who is there already stays; what is not known yet keeps nobody out. Nor is anybody
        kept out where nobody is: it takes nothing from others, says itself when drafts are worth their time, and
        without it nothing would be measured again after an hour in which the device was slow."""
        there = self._targets.get(target_id)
        if there is not None:
            there.plain_s, there.verify_s = plain_s, verify_s
            return ""
        coming = _Times(plain_s, verify_s)
        why = self._why_not(coming, max(requests / max(len(self._targets), 1), 1.0))
        if not why:
            self._targets[target_id] = coming
        return why

    def _why_not(self, coming: _Times, each: float) -> str:
        """each: requests of one target."""
        if self._served < FEWEST or not self.tokens or not self._targets:
            return ""
        service_s, now = measured(self._service_s), len(self._targets)
        for times, is_new in ((coming, True), *((times, False) for times in self._targets.values())):
            if not times.plain_s or not times.return_s:
                continue
            worth_s = self.tokens * times.plain_s
            if self._round_s(now + 1, each, times.return_s) <= worth_s:
                continue
            if not is_new and self._round_s(now, each, times.return_s) > worth_s:
                continue  # it is no worse off than it is
            would_s = self._round_s(now + 1, each, times.return_s)
            most = max_targets_batched(service_s, times.return_s, self.tokens, times.plain_s, max_rows=self._max_rows)
            whose = "this target" if is_new else "a target that is here"
            return (
                f"{now} targets are served, {each:.3g} requests each, and the most that pay are {int(most / each)}: "
                f"with one more, a request of {whose} would get {self.tokens / would_s:.1f} tokens/s with drafts of "
                f"{1e3 * service_s(1):.2f} ms, and has {1.0 / times.plain_s:.1f} tokens/s by plain decoding; decode "
                "without this service, or start another"
            )
        return ""

    def _round_s(self, targets: int, each: float, back_s: float) -> float:
        requests = max(round(targets * each), 1)
        return rounds(requests, measured(self._service_s), back_s, self.tokens, max_rows=self._max_rows).round_s
