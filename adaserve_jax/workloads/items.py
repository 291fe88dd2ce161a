"""Items of a workload: requests with a text or lengths, targets, and perhaps times."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass

from adaserve_jax.sampling import SamplingParams
from adaserve_jax.types import SLO

BLOCK_TOKENS = 512
"""Prompt tokens that one block of `Lengths` stands for, unless it says otherwise: Mooncake's."""


@dataclass(frozen=True, slots=True)
class Message:
    """One turn of a chat."""

    role: str
    content: str


@dataclass(frozen=True, slots=True)
class Lengths:
    """Token counts of a request, which a trace gives instead of a text or beside it. blocks: names of the prompt's
    blocks of `block_tokens` tokens, the last one perhaps partial; prompts whose first blocks have equal names begin
    alike.
    """

    prompt_tokens: int
    output_tokens: int
    blocks: tuple[int, ...] = ()
    block_tokens: int = BLOCK_TOKENS


@dataclass(frozen=True, slots=True)
class WorkloadItem:
    """One request to replay. Either `prompt` or `messages` is set, or neither: then only `lengths` is known.

    lengths may stand beside a text: a simulation goes by them, a bench by the text. seed None: one is derived from the
    run's seed. arrival_s: on the workload's own clock.
    """

    prompt: str | None
    messages: tuple[Message, ...]
    max_tokens: int
    slo_class: str
    slo: SLO
    temperature: float
    seed: int | None
    arrival_s: float | None
    lengths: Lengths | None = None

    @property
    def by_length(self) -> bool:
        """True if only lengths are known, so that a text has to be made (`prompt_text`)."""
        return self.prompt is None and not self.messages

    def sampling(self) -> SamplingParams:
        """Return the sampling parameters. Outputs of requests that are known only by length are exactly as long as the
        trace says."""
        return SamplingParams(
            max_tokens=self.max_tokens, temperature=self.temperature, seed=self.seed, ignore_eos=self.by_length
        )


@dataclass(frozen=True)
class Workload:
    """Requests to replay; items is not empty. sha256, hex: of what the file holds; of a workload made from another
    (`derived`), of that one's hash and what was done to it. notes: sentences on what reading left out."""

    name: str
    sha256: str
    items: tuple[WorkloadItem, ...]
    notes: tuple[str, ...] = ()

    @property
    def has_arrivals(self) -> bool:
        return self.items[0].arrival_s is not None

    @property
    def classes(self) -> list[str]:
        """Return the names of the SLO classes, in order."""
        return sorted({item.slo_class for item in self.items})

    def derived(self, note: str, items: Iterable[WorkloadItem]) -> Workload:
        """Return another workload of `items`, that says by its name and hash how it came from this one."""
        return Workload(f"{self.name} {note}", derived_hash(self.sha256, note), tuple(items), self.notes)


def derived_hash(sha256: str, note: str) -> str:
    """Return the hash, in hex, of requests that came from those of `sha256` by what `note` says."""
    return hashlib.sha256(f"{sha256} {note}".encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """Lengths and target of a request, without a text.

    due_s: seconds since the start of the trace. tenant: who sends it. max_tokens: limit that it sends to a simulated
    scheduler; 0: the same as output_tokens. If it is above that, the request stops before its limit, and the scheduler
    is not told when.
    """

    due_s: float
    prompt_tokens: int
    output_tokens: int
    slo: SLO
    slo_class: str
    tenant: str = ""
    max_tokens: int = 0
