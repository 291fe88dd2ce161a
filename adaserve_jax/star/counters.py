"""What a draft service has done so far. Imports no jax."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


@dataclass
class CoreStats:
    """Counters since the start. batches: runs of the device; rounds: Drafts searched; trees: Trees answered, with those
    sent again; fed_tokens: into KV; stale: messages and trees of another epoch or round; duplicates: messages heard
    before; resyncs: sessions that had to be opened anew; refused: by code; expired: Drafts whose tree could not be
    ready in time; failed: Drafts whose batch failed; leases_ended: sessions, with those that went for others' sake;
    evicted: times that a session's KV went for another's; queue_s: seconds that answered Drafts waited for the device,
    summed. ahead_trees: searched before they were asked for; ahead_hits: of these, what answered a Draft; ahead_misses:
    what will answer none: its session asked for another text or shape, was opened anew, lost its room, or ended. Others
    still may."""

    batches: int = 0
    rounds: int = 0
    trees: int = 0
    fed_tokens: int = 0
    stale: int = 0
    duplicates: int = 0
    resyncs: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    expired: int = 0
    failed: int = 0
    leases_ended: int = 0
    evicted: int = 0
    queue_s: float = 0.0
    ahead_trees: int = 0
    ahead_hits: int = 0
    ahead_misses: int = 0
