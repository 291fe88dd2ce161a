"""Timings and counts of one choice of a request, and whether it met its targets."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

TpotParts = tuple[tuple[float | None, float | None], ...]
"""TPOT target and measured TPOT, in seconds, of each part of an output that may have a target of its own."""


class _TimedParts(Protocol):
    """Targets and measured TPOTs of one choice, in seconds."""

    @property
    def tpot_slo_s(self) -> float | None: ...
    @property
    def tpot_s(self) -> float | None: ...
    @property
    def thinking_tpot_slo_s(self) -> float | None: ...
    @property
    def thinking_tpot_s(self) -> float | None: ...
    @property
    def answer_tpot_s(self) -> float | None: ...


def tpot_parts(choice: _TimedParts) -> TpotParts:
    """Return thinking and answer of a choice with a thinking target, else one part of all tokens."""
    if choice.thinking_tpot_slo_s is None:
        return ((choice.tpot_slo_s, choice.tpot_s),)
    return (choice.thinking_tpot_slo_s, choice.thinking_tpot_s), (choice.tpot_slo_s, choice.answer_tpot_s)


@dataclass(frozen=True)
class RequestMetrics:
    """Timings and counts of one choice, defined in docs/metrics.md. Times are on the engine's monotonic clock.

    thinking_tokens: output tokens up to the closing mark, all of them if the text ended before it, 0 if it did not
    think. thinking_last_s: when the last of them came. Both are known of choices with a thinking target only.
    """

    arrival_s: float
    first_scheduled_s: float | None = None
    first_token_s: float | None = None
    last_token_s: float | None = None
    prompt_tokens: int = 0
    output_tokens: int = 0
    verify_steps: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    accepted_steps: tuple[int, ...] = ()
    """Steps that verified candidates, by how many of them were accepted, from none to the deepest tree's depth."""
    preemptions: int = 0
    cached_tokens: int = 0
    """Prompt tokens whose KV came from the prefix cache when the sequence was first scheduled."""
    tpot_slo_s: float | None = None
    ttft_slo_s: float | None = None
    slo_class: str = "default"
    slo_feasible: bool | None = None
    """True if one request alone on an empty machine could meet every target, judged at admission; None without a
    target.
    """
    thinking_tpot_slo_s: float | None = None
    thinking_tokens: int = 0
    thinking_last_s: float | None = None
    e2e_slo_s: float | None = None

    @property
    def ttft_s(self) -> float | None:
        """Seconds from arrival to the first token."""
        return None if self.first_token_s is None else self.first_token_s - self.arrival_s

    @property
    def e2e_s(self) -> float | None:
        """Seconds from arrival to the last token so far."""
        return None if self.last_token_s is None else self.last_token_s - self.arrival_s

    @property
    def queue_s(self) -> float | None:
        """Seconds from arrival to the first step."""
        return None if self.first_scheduled_s is None else self.first_scheduled_s - self.arrival_s

    @property
    def tpot_s(self) -> float | None:
        """(last token - first token) / (N - 1) for N >= 2 output tokens, else None."""
        if self.output_tokens < 2 or self.first_token_s is None or self.last_token_s is None:
            return None
        return (self.last_token_s - self.first_token_s) / (self.output_tokens - 1)

    @property
    def thinking_tpot_s(self) -> float | None:
        """Return (last token of the thinking - first token) / (T - 1) for T >= 2 tokens up to the closing mark."""
        if self.thinking_tokens < 2 or self.first_token_s is None or self.thinking_last_s is None:
            return None
        return (self.thinking_last_s - self.first_token_s) / (self.thinking_tokens - 1)

    @property
    def answer_tpot_s(self) -> float | None:
        """Return (last token - closing mark) / tokens behind the mark, if there are any, and `tpot_s` of a text that
        did not think. None without a thinking target.
        """
        if self.thinking_tpot_slo_s is None or self.thinking_tokens == 0:
            return None if self.thinking_tpot_slo_s is None else self.tpot_s
        answer_tokens = self.output_tokens - self.thinking_tokens
        if answer_tokens < 1 or self.thinking_last_s is None or self.last_token_s is None:
            return None
        return (self.last_token_s - self.thinking_last_s) / answer_tokens

    @property
    def tpot_parts(self) -> TpotParts:
        """Return the targets and TPOTs of thinking and answer with a thinking target, else those of all tokens."""
        return tpot_parts(self)

    @property
    def thinking_tpot_met(self) -> bool | None:
        """True if the thinking target is met, by the rule of `tpot_met`. None without such a target."""
        return None if self.thinking_tpot_slo_s is None else self._met(self.tpot_parts[:1])

    @property
    def tpot_met(self) -> bool | None:
        """True if every part with a TPOT target met it; a part without a time per token counts as met, an output
        without tokens as not met. None without a target.
        """
        return self._met(self.tpot_parts)

    def _met(self, parts: TpotParts) -> bool | None:
        targeted = [(target_s, tpot_s) for target_s, tpot_s in parts if target_s is not None]
        if not targeted:
            return None
        return self.output_tokens > 0 and all(tpot_s is None or tpot_s <= target_s for target_s, tpot_s in targeted)

    @property
    def ttft_met(self) -> bool | None:
        """True if the TTFT target is met. None without a target."""
        if self.ttft_slo_s is None:
            return None
        return self.ttft_s is not None and self.ttft_s <= self.ttft_slo_s

    @property
    def e2e_met(self) -> bool | None:
        """True if the last token came before the deadline. None without one."""
        if self.e2e_slo_s is None:
            return None
        return self.e2e_s is not None and self.e2e_s <= self.e2e_slo_s

    @property
    def slo_met(self) -> bool | None:
        """True if all targets are met; None without targets."""
        outcomes = [met for met in (self.tpot_met, self.ttft_met, self.e2e_met) if met is not None]
        return all(outcomes) if outcomes else None

    @property
    def mean_accepted(self) -> float:
        """Accepted draft tokens per verification, bonus token not counted."""
        return self.accepted_tokens / self.verify_steps if self.verify_steps else 0.0
