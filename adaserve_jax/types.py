"""Vocabulary of the engine: sequences, targets, plans, trees, outcomes, and the protocols between parts.

Axis letters: R rows of a step, C candidates, N packed tree nodes, P pages, V vocabulary. Times are in seconds; only the
constructor of `SLO`, which is public API, takes milliseconds.

Probabilities of tree nodes. The chance of a node is the conditional probability that the target accepts it, given that
it accepted the node's parent. f(v) is the probability that the target accepts the whole path from the root to node v:
the product of the chances along the path, 1 for the root. log_f is its natural logarithm. q is the draft model's own
probability of a token, from which chances are calibrated.
"""

from __future__ import annotations

from collections import abc
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol

import numpy as np

from adaserve_jax.request_metrics import RequestMetrics
from adaserve_jax.sampling import RowSampling, SamplingParams, is_finite, require

FinishReason = Literal["stop", "length", "abort", "error"]
NO_TARGET = 1e-9
"""Targets up to this, in milliseconds or as multiples, are refused as 0 is: the rates that they ask for cannot be
planned."""


@dataclass(frozen=True)
class SLO:
    """Speed target of one request; None means no target of that kind.

    tpot_ms: milliseconds per output token after the first. ttft_ms: milliseconds to the first token. relative: TPOT
    target as a multiple of the measured baseline latency (one token, no speculation, one request alone); resolved
    at admission. e2e_ms: milliseconds from the request's arrival to its last token. thinking_tpot_ms: milliseconds
    per token while the output thinks, up to its closing mark; the TPOT target is then that of the tokens behind the
    mark. Raises RequestError(code="invalid_slo") unless finite and > NO_TARGET.
    """

    tpot_ms: float | None = None
    ttft_ms: float | None = None
    relative: float | None = None
    thinking_tpot_ms: float | None = None
    e2e_ms: float | None = None

    def __post_init__(self) -> None:
        for name, param in (
            ("tpot_ms", "slo_tpot_ms"), ("ttft_ms", "slo_ttft_ms"), ("relative", "slo_relative"),
            ("thinking_tpot_ms", "slo_thinking_tpot_ms"), ("e2e_ms", "slo_e2e_ms"),
        ):  # fmt: skip
            value = getattr(self, name)
            if value is not None:
                require(is_finite(value) and value > NO_TARGET, param, "a finite number above 0", value, "invalid_slo")
        both = self.tpot_ms is not None and self.relative is not None
        require(not both, "slo_relative", "absent when slo_tpot_ms is given", self.relative, "invalid_slo")

    def tpot_s(self, baseline_s: float) -> float | None:
        """Return seconds per output token; `baseline_s` is the measured baseline latency that `relative` multiplies."""
        if self.relative is not None:
            return self.relative * baseline_s
        return None if self.tpot_ms is None else self.tpot_ms / 1e3

    @property
    def thinking_tpot_s(self) -> float | None:
        """Seconds per token while the output thinks."""
        return None if self.thinking_tpot_ms is None else self.thinking_tpot_ms / 1e3

    @property
    def ttft_s(self) -> float | None:
        """Seconds to the first token."""
        return None if self.ttft_ms is None else self.ttft_ms / 1e3

    @property
    def e2e_s(self) -> float | None:
        """Seconds to the last token."""
        return None if self.e2e_ms is None else self.e2e_ms / 1e3


@dataclass(frozen=True)
class TokenLogprob:
    """Log probabilities at one token of the output or of the prompt.

    logprob: natural log of the token's probability under the model's own logits, before penalties, biases, temperature
    and filters. top: the likeliest tokens with theirs, best first. rank: place of the token among all, 1 for the
    likeliest; tokens that are as likely have the same.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    rank: int = 1


@dataclass(frozen=True, eq=False)
class Sequence:
    """One choice of one user request, as the scheduler receives it; immutable.

    prompt_ids: i32[tokens], not empty. seed: always drawn by now. choice: index among the n choices of the request.
    tpot_slo_s, ttft_slo_s: targets in seconds, or None. thinking_tpot_slo_s: TPOT target of the thinking;
    tpot_slo_s is then that of the answer alone. e2e_slo_s: deadline of the last token, in seconds from the arrival.
    priority: lower is sooner. arrival_s: on the engine's clock. stop_token_ids: with the model's EOS ids unless
    `ignore_eos`. cache_salt: sequences share cached KV pages only within one salt. draft: index of the draft model
    that speculates for it. adapter: slot of the adapter that its tokens go through; 0: none. keeps_text: its text may
    be kept to draft from, for sequences of the same salt. tenant: account that the request belongs to; shares are kept
    fair among tenants where the configuration says so.
    """

    sequence_id: str
    prompt_ids: np.ndarray
    sampling: SamplingParams
    seed: int
    arrival_s: float
    choice: int = 0
    tpot_slo_s: float | None = None
    ttft_slo_s: float | None = None
    priority: int = 0
    slo_class: str = "default"
    stop_token_ids: frozenset[int] = frozenset()
    cache_salt: str = ""
    draft: int = 0
    adapter: int = 0
    thinking_tpot_slo_s: float | None = None
    e2e_slo_s: float | None = None
    keeps_text: bool = True
    tenant: str = ""


@dataclass(frozen=True)
class Limits:
    """Capacity of the executor's compiled programs; the scheduler plans within it.

    token_edges: increasing lengths of the packed token array (target tokens of one step, tree and prefill); one edge in
    deterministic mode. max_tree_tokens: most positions of a step whose logits are sampled (tree nodes, roots and
    prefill ends). max_context: most tokens of one sequence, prompt and output together. max_depth, max_width: of one
    beam search, 0 without a draft. num_pages: pages of the base pool, with ids below it. extension_pages: pages that
    fit in the draft's memory while it is away, with ids from num_pages on; 0 if the draft always stays. suffix_depth:
    deepest node that the suffix source proposes; 0 without one. draft_is_head: the draft reads what the target computed
    for the token before, so it is fed no further than one token beyond the target's KV.
    """

    max_requests: int
    token_edges: tuple[int, ...]
    max_tree_tokens: int
    max_context: int
    page_size: int
    num_pages: int
    max_depth: int
    max_width: int
    extension_pages: int = 0
    suffix_depth: int = 0
    draft_is_head: bool = False

    @property
    def max_tree_depth(self) -> int:
        """Depth of the deepest tree that can be verified; a step emits one token more."""
        return max(self.max_depth, self.suffix_depth)

    @property
    def max_tokens(self) -> int:
        """Most packed tokens of one step."""
        return self.token_edges[-1]

    @property
    def max_pages_per_request(self) -> int:
        """Pages of a sequence of max_context tokens."""
        return -(-self.max_context // self.page_size)

    @property
    def kv_tokens(self) -> int:
        """Tokens that the base pool holds."""
        return self.num_pages * self.page_size

    def bucket(self, num_tokens: int) -> int:
        """Return the smallest edge that holds `num_tokens`. Raises ValueError above the last edge."""
        for edge in self.token_edges:
            if num_tokens <= edge:
                return edge
        raise ValueError(f"{num_tokens} tokens do not fit the largest bucket {self.max_tokens}")


@dataclass(frozen=True, eq=False)
class DraftPlan:
    """Work of the draft in one step.

    depth, width: bounds of the beam search; depth 0 means only catch up. catchup_tokens: i32[sum(catchup_counts)], row
    after row, tokens that the draft's KV lacks and that it is fed before it searches; a row that speculates ends with
    its root token. catchup_counts: i32[R]. draft_ctx: i32[R], tokens already in the draft's KV. speculates:
    bool[num_decode].

    calibrated: f is made of calibrated chances, not of the draft's own probabilities. chances: f32[2, D, ranks, bins],
    a new table of calibrated chances, used from this step on; None: no change. drafts: i32[R], index of each row's
    draft model; None: the first for all. due_s: f64[num_decode], seconds from planning until the row's next token is
    due, 0 if late, inf without a target; None with a local draft.
    """

    depth: int
    width: int
    catchup_tokens: np.ndarray
    catchup_counts: np.ndarray
    draft_ctx: np.ndarray
    speculates: np.ndarray
    calibrated: bool = True
    chances: np.ndarray | None = None
    drafts: np.ndarray | None = None
    due_s: np.ndarray | None = None

    @property
    def is_remote(self) -> bool:
        """True if a draft service drafts."""
        return self.due_s is not None

    @property
    def waited_tokens(self) -> int:
        """Catch-up tokens that the step waits for; a draft service is fed those of rows that do not speculate
        meanwhile.
        """
        counts = self.catchup_counts
        return int(counts[: len(self.speculates)][self.speculates].sum() if self.is_remote else counts.sum())


@dataclass(frozen=True, eq=False)
class ScoredPrompts:
    """Positions of a step's prefill chunks after which the prompt's own next token is scored, M in all.

    rows: i32[Q], rows of the step, ascending; counts: i32[Q], consecutive positions of each; tops: i32[Q], how many of
    the likeliest tokens each reports. at: i32[M], indices into `StepPlan.prefill_tokens`. token: i32[M], the prompt's
    tokens after these positions.
    """

    rows: np.ndarray
    counts: np.ndarray
    tops: np.ndarray
    at: np.ndarray
    token: np.ndarray

    @property
    def num_positions(self) -> int:
        """M."""
        return len(self.at)


@dataclass(frozen=True, eq=False)
class StepPlan:
    """One step to run. Its rows are decode rows first (one pending token each), then prefill rows.

    slots: i32[R], the engine slot of each row, stable while a sequence runs. root_token: i32[num_decode]. ctx_len:
    i32[R], tokens with committed target KV. page_table: i32[R, max_pages_per_request], unused entries 0.
    prefill_tokens: i32[sum(prefill_counts)]. prefill_counts: i32[R - num_decode]. prefill_final: bool[R - num_decode],
    True if the chunk ends the prompt, so that one token is sampled from its end. tree_token_cap: most tree tokens,
    roots included. scored: positions whose logits are computed too, to score the prompts; None: there are none.
    adapters: i32[R], the slot of each row's adapter, 0 for none; None: no row has one.
    """

    step: int
    slots: np.ndarray
    num_decode: int
    root_token: np.ndarray
    ctx_len: np.ndarray
    page_table: np.ndarray
    sampling: RowSampling[np.ndarray]
    prefill_tokens: np.ndarray
    prefill_counts: np.ndarray
    prefill_final: np.ndarray
    draft: DraftPlan | None
    tree_token_cap: int
    scored: ScoredPrompts | None = None
    adapters: np.ndarray | None = None

    @property
    def num_rows(self) -> int:
        """R."""
        return len(self.slots)

    @property
    def num_prefill_tokens(self) -> int:
        """Prefill tokens of all rows."""
        return len(self.prefill_tokens)


@dataclass(frozen=True, eq=False)
class CandidateTrees:
    """Candidate nodes of every decode row, parents first; a beam's index is (depth - 1) * width + rank in the beam.

    token, parent: i32[num_decode, C]; parent is a candidate index of the same row, -1 for the root. log_f:
    f32[num_decode, C], -inf for an absent node. depth: i32[C], from 1. cell: i32[num_decode, C], index into [D, ranks,
    bins] of the chance used for the node, -1 for an absent one. log_q: f32[num_decode, C], log of the draft's own
    probability of the node given its parent. cell and log_q are None from a drafter that does not know them.
    """

    token: np.ndarray
    parent: np.ndarray
    log_f: np.ndarray
    depth: np.ndarray
    cell: np.ndarray | None = None
    log_q: np.ndarray | None = None

    @staticmethod
    def empty(num_rows: int) -> CandidateTrees:
        """Return trees without candidates."""
        ints = np.zeros((num_rows, 0), np.int32)
        return CandidateTrees(ints, ints, np.zeros((num_rows, 0), np.float32), np.zeros(0, np.int32))


@dataclass(frozen=True, eq=False)
class DraftTrees:
    """Selected trees of all decode rows, packed row after row, each root first and parents before children.

    row, token, parent, depth, candidate: i32[N]; parent is an index into the packed array, -1 for a root; candidate is
    the column in CandidateTrees, -1 for a root. f: f32[N], 1 for a root.
    """

    row: np.ndarray
    token: np.ndarray
    parent: np.ndarray
    depth: np.ndarray
    candidate: np.ndarray
    f: np.ndarray

    @property
    def num_nodes(self) -> int:
        """N."""
        return len(self.row)


@dataclass(frozen=True, eq=False)
class LogitEdits:
    """Changes to the target's logits before tokens are drawn, and requests for log probabilities.

    There are N sampled positions: tree nodes in packed order, then the ends of prompts in row order. E entries name
    tokens that a row's penalties or biases concern, each once per row; tokens on the path to a tree node are added on
    the device.

    presence, frequency, repetition: f32[R]. row, token: i32[E]. output_count: i32[E], occurrences in the row's output.
    in_prompt: bool[E]. bias: f32[E]. allowed: u32[N, ceil(V / 32)], bit v % 32 of word v // 32 allows token v; None
    allows all. changed: bool[N], positions that any edit concerns; the others draw as without edits. logprobs: i32[R],
    number of likeliest tokens to report beside the drawn one; -1 reports nothing.
    """

    presence: np.ndarray
    frequency: np.ndarray
    repetition: np.ndarray
    row: np.ndarray
    token: np.ndarray
    output_count: np.ndarray
    in_prompt: np.ndarray
    bias: np.ndarray
    allowed: np.ndarray | None
    changed: np.ndarray
    logprobs: np.ndarray


@dataclass(frozen=True, eq=False)
class Logprobs:
    """Log probabilities of tokens, natural logs under the raw logits, in arrays of any shape [..., K].

    own: f32[...], of the tokens themselves. rank: i32[...], 1 + the number of likelier tokens. top_ids: i32[..., K] and
    top: f32[..., K], the likeliest tokens, best first.
    """

    own: np.ndarray
    rank: np.ndarray
    top_ids: np.ndarray
    top: np.ndarray

    def of(self, at: Any, token_ids: abc.Sequence[int], count: int) -> tuple[TokenLogprob, ...]:
        """Return those of `token_ids`, which are the first ones at index `at`, each with `count` likeliest tokens."""
        own, rank = self.own[at].tolist(), self.rank[at].tolist()
        ids, top = self.top_ids[at][:, :count].tolist(), self.top[at][:, :count].tolist()
        return tuple(
            TokenLogprob(token, own[place], tuple(zip(ids[place], top[place], strict=True)), rank[place])
            for place, token in enumerate(token_ids)
        )


@dataclass(frozen=True, eq=False)
class StepOutcome:
    """Result of a verification.

    tokens: i32[R, max_tree_depth + 1], the first counts[r] valid. counts: i32[R], 0 for a prefill chunk that does not
    end its prompt. accepted: bool[N], per packed tree node, roots True. draft_s: wall time from the call of speculate
    to its candidates on the host, 0 without a draft; verify_s likewise. wait_s: part of both spent waiting for the
    device or a draft service. bucket: packed length that ran. logprobs: of the emitted tokens, in the shape of
    `tokens`, zeros where that has none; set if the edits asked for any. edited: bool[R], rows whose logits were
    changed; None without edits. prompt_logprobs: of the tokens of `StepPlan.scored`, [M]; set if there are any.
    """

    tokens: np.ndarray
    counts: np.ndarray
    accepted: np.ndarray
    draft_s: float
    verify_s: float
    wait_s: float
    bucket: int
    logprobs: Logprobs | None = None
    edited: np.ndarray | None = None
    prompt_logprobs: Logprobs | None = None


@dataclass(frozen=True)
class SequenceUpdate:
    """New tokens of one sequence after a step.

    finish_reason and metrics are set exactly once, at its end. logprobs has one entry per token if the request asked
    for them, else none.
    """

    sequence_id: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None = None
    metrics: RequestMetrics | None = None
    logprobs: tuple[TokenLogprob, ...] = ()


class StopCheck(Protocol):
    """Finder of stop strings. Called once per sequence and step, in order."""

    def __call__(self, sequence_id: str, token_ids: abc.Sequence[int]) -> int | None:
        """Take in new tokens; return how many of them to keep if a stop string ended the text, else None."""
        ...


Progress = Callable[[str, int, int], None]
"""progress(stage, done, total), called during warm-up."""


class Executor(Protocol):
    """Runner of the models, and the only part that touches a device. Host arrays in, host arrays out; one step at a
    time.
    """

    @property
    def limits(self) -> Limits: ...

    @property
    def compiles_after_ready(self) -> int: ...

    def warm_up(self, progress: Progress | None = None, samples: CostSamples | None = None) -> CostSamples:
        """Compile every program and time each; afterwards nothing compiles. samples: of an earlier start, which are
        returned instead of new times."""
        ...

    def speculate(self, plan: StepPlan) -> CandidateTrees:
        """Feed the catch-up tokens to the draft, then search; `plan.draft` is not None."""
        ...

    def verify(
        self, plan: StepPlan, trees: DraftTrees, edits: LogitEdits | None = None,
        meanwhile: Callable[[], None] | None = None,
    ) -> StepOutcome:  # fmt: skip
        """Run one target forward over trees and prefill chunks; accepted KV is committed before anything else runs.

        edits: changes to the logits that tokens are drawn from, and log probabilities to report; None costs nothing.
        meanwhile: called once, when the device has its work and before its results are waited for.
        """
        ...

    def expand(self) -> None:
        """Free the draft and make the extension slab of its memory. Called between steps, with the draft resident.

        Afterwards pages up to num_pages + extension_pages exist and no plan has a draft. Raises ElasticError if the
        slab could not be made: the draft is back with empty KV, and the pages are as they were.
        """
        ...

    def move_pages(self, from_pages: np.ndarray, to_pages: np.ndarray) -> None:
        """Copy target KV of pages to other pages, i32[N] each, disjoint. Called between steps while expanded.

        Raises ElasticError: pages outside `to_pages` are as they were.
        """
        ...

    def contract(self) -> None:
        """Free the extension slab, which is not in use any more, and begin to load the draft; return at once.

        Raises ElasticError: still expanded.
        """
        ...

    def draft_ready(self) -> bool:
        """Return whether the draft is resident again after `contract`, its KV empty. Never waits.

        Raises ElasticError if loading failed; the next call begins anew.
        """
        ...

    def close(self) -> None: ...


class Drafter(Protocol):
    """Proposer of candidate trees: the local one runs on this device, a remote one asks a draft service.

    A plan carries all that a separate draft model needs. A drafter that also needs the target's hidden states or
    weights gets them from the executor that creates it; they stay on the device.
    """

    @property
    def wait_s(self) -> float:
        """Seconds that the last call waited for the device or for a service."""
        ...

    def propose(self, plan: StepPlan) -> CandidateTrees:
        """Catch up, then beam-search each speculating row. A drafter that fails returns no candidates."""
        ...


class DraftSessions(Protocol):
    """State that a draft service keeps for each slot; part of a remote drafter."""

    @property
    def available(self) -> bool:
        """True if the service may be asked for trees now; otherwise plans have no draft."""
        ...

    def ended(self, slots: np.ndarray) -> None:
        """Close the sessions of slots (i32[n]) whose sequences run no more. Called between two proposals."""
        ...


@dataclass(frozen=True)
class CostSamples:
    """Seconds measured at warm-up, with `context` committed tokens in every row.

    verify_s: by (bucket tokens, rows). catchup_s: by packed catch-up tokens. draft_level_s: one beam level, by (rows,
    width). switch_s: until drafts of so many rows have caught up on so many tokens each, by (lag, rows), where
    measured.

    *_per_context_s: by the same keys, the cost of one more token of context load; a missing key costs nothing. The
    context load is what `context_load` makes of the rows' contexts: rows are read in groups of `context_rows`, in
    order, and each group waits for its longest. context 0: nothing depends on the context.
    """

    verify_s: dict[tuple[int, int], float]
    catchup_s: dict[int, float]
    draft_level_s: dict[tuple[int, int], float]
    context: int = 0
    context_rows: int = 1
    verify_per_context_s: dict[tuple[int, int], float] = field(default_factory=dict[tuple[int, int], float])
    catchup_per_context_s: dict[int, float] = field(default_factory=dict[int, float])
    level_per_context_s: dict[tuple[int, int], float] = field(default_factory=dict[tuple[int, int], float])
    switch_s: dict[tuple[int, int], float] = field(default_factory=dict[tuple[int, int], float])


def scaled_samples(samples: CostSamples, *, verify: float, draft: float) -> CostSamples:
    """Return the samples with verification and draft times multiplied by these factors."""
    by_verify = {name: _scaled(getattr(samples, name), verify) for name in ("verify_s", "verify_per_context_s")}
    names = ("catchup_s", "draft_level_s", "catchup_per_context_s", "level_per_context_s", "switch_s")
    by_draft = {name: _scaled(getattr(samples, name), draft) for name in names}
    return replace(samples, **by_verify, **by_draft)


def _scaled(seconds: dict[Any, float], factor: float) -> dict[Any, float]:
    return {key: each * factor for key, each in seconds.items()}


def context_load(context: np.ndarray, context_rows: int) -> float:
    """Return the tokens of context that a step reads: the longest of each group of `context_rows` rows, summed.

    context: i64[R], committed tokens.
    """
    if len(context) <= context_rows:
        return float(context.max()) if len(context) else 0.0
    return float(np.maximum.reduceat(context, np.arange(0, len(context), context_rows)).sum())
