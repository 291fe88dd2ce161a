"""A simulated machine that keeps track of its KV: what each slot of each page holds, so that wrong reads and writes are
found at once.

What a slot holds is named after all tokens up to it, whoever wrote them: requests may share pages, but none may read
the KV of other tokens, or of its own at another place.
"""

from __future__ import annotations

import numpy as np

from adaserve_jax.errors import IntegrityError
from adaserve_jax.sim.executor import SimExecutor
from adaserve_jax.sim.text import token_at
from adaserve_jax.types import CandidateTrees, Limits, Sequence, StepOutcome, StepPlan


class StrictExecutor(SimExecutor):
    """A SimExecutor that raises IntegrityError when a plan reads KV of other tokens than the request's own, or writes a
    page that others hold."""

    def __init__(self, limits: Limits, *args, vocab_size: int = 1000, **options):
        super().__init__(limits, *args, vocab_size=vocab_size, **options)
        self.kv = SimKV(limits, vocab_size)

    def know(self, request: Sequence) -> None:
        """Register the text of a sequence, so that it is seen to read KV of others even in shared pages."""
        self.kv.know(request.prompt_ids, request.seed, request.choice)

    def speculate(self, plan: StepPlan) -> CandidateTrees:
        found, draft = super().speculate(plan), plan.draft
        assert draft is not None, "called for plans with a draft"
        self.kv.extend_draft(plan)
        ends = draft.draft_ctx + draft.catchup_counts
        caught_up = ends[: plan.num_decode] == plan.ctx_len[: plan.num_decode] + 1
        if draft.depth and not caught_up[draft.speculates].all():
            raise IntegrityError("a row that speculates does not end its catch-up with the root")
        return found

    def verify(self, plan: StepPlan, *args, **options) -> StepOutcome:
        outcome = super().verify(plan, *args, **options)
        self.kv.extend_target(plan, outcome.tokens, outcome.counts)
        return outcome

    def expand(self) -> None:
        super().expand()
        self.kv.drop_draft()
        self.kv.add_extension()

    def move_pages(self, from_pages: np.ndarray, to_pages: np.ndarray) -> None:
        super().move_pages(from_pages, to_pages)
        self.kv.move_pages(from_pages, to_pages)

    def contract(self) -> None:
        super().contract()
        self.kv.drop_extension()


class SimKV:
    """The KV of target and draft. `know` tells what a request's text is; of one that is not known only this is checked,
    that what it reads is one text from its beginning on."""

    def __init__(self, limits: Limits, vocab_size: int):
        self._num_pages, self._extension_pages = limits.num_pages, limits.extension_pages
        self._vocab_size = vocab_size
        self._texts: dict[tuple[int, int], list[_Text]] = {}
        self._target = _Record(limits.num_pages, limits.extension_pages, limits.page_size)
        self._draft = _Record(limits.num_pages, 0, limits.page_size)

    def know(self, prompt_ids: np.ndarray, seed: int, choice: int) -> None:
        """Register a sequence by its prompt, seed and choice."""
        text = _Text(np.asarray(prompt_ids, np.int32), seed, choice, self._vocab_size)
        self._texts.setdefault((seed, choice), []).append(text)

    def extend_draft(self, plan: StepPlan) -> None:
        """Feed the draft the catch-up of a plan. Raises IntegrityError when a row reads KV of another text, or two rows
        write different entries to one slot."""
        draft = plan.draft
        assert draft is not None, "called for plans with a draft"
        self._extend(self._draft, plan, draft.draft_ctx, draft.catchup_counts, draft.catchup_tokens)

    def extend_target(self, plan: StepPlan, tokens: np.ndarray, counts: np.ndarray) -> None:
        """Commit a step of the target: the prefill chunks and, behind the root of decode row r, the first counts[r] - 1
        of its tokens (i32[R, D]). Raises IntegrityError as `extend_draft` does, and when a written page is shared."""
        decode, computed = plan.num_decode, counts[: plan.num_decode]
        fed = np.concatenate([plan.root_token[:, None], tokens[:decode, :-1]], axis=1)
        fed = np.concatenate([fed[np.arange(fed.shape[1]) < computed[:, None]], plan.prefill_tokens])
        written = np.concatenate([computed, plan.prefill_counts])
        self._target.require_own(plan, plan.ctx_len, written)
        self._extend(self._target, plan, plan.ctx_len, written, fed)

    def move_pages(self, from_pages: np.ndarray, to_pages: np.ndarray) -> None:
        """Copy the target's KV of pages to other pages."""
        self._target.copy(from_pages, to_pages)

    def add_extension(self) -> None:
        """Add the empty pages of the extension slab."""
        self._target.in_force = self._num_pages + self._extension_pages

    def drop_extension(self) -> None:
        """Drop the extension slab and its contents."""
        self._target.clear(self._num_pages)
        self._target.in_force = self._num_pages

    def drop_draft(self) -> None:
        """Drop the draft's KV."""
        self._draft.clear(0)

    def _extend(self, record: _Record, plan: StepPlan, ctx: np.ndarray, counts: np.ndarray, tokens: np.ndarray) -> None:
        """Feed `tokens` behind the first ctx[r] ones of each row. All rows read before any writes.

        `row`, `position`, `slots` and `names` have an entry for each token of each row, row by row.
        """
        if len(tokens) != counts.sum():
            raise IntegrityError(f"{len(tokens)} tokens are fed to rows that make KV of {counts.sum()}")
        ends = ctx + counts
        row = np.repeat(np.arange(len(ends)), ends)
        begins = ends.cumsum() - ends
        position = np.arange(len(row)) - begins[row]
        fed = position >= ctx[row]
        slots = record.slots(plan.page_table, row, position)
        names = record.read(slots, row, position, ~fed)
        nothing = np.zeros(1, np.uint64)
        before_fed = np.where(ctx > 0, np.concatenate([nothing, names])[begins + ctx], nothing)
        totals = np.concatenate([nothing, kv_terms(tokens, position[fed]).cumsum(dtype=np.uint64)])
        names[fed] = totals[1:] + np.repeat(before_fed - totals[counts.cumsum() - counts], counts)
        record.write(slots, names, position, fed)
        for at, (begin, end) in enumerate(zip(begins.tolist(), (begins + ends).tolist(), strict=True)):
            seed, choice = int(plan.sampling.seed[at]), int(plan.sampling.choice[at])
            self._check_text(seed, choice, names[begin:end], int(ctx[at]), at)
        record.require_names(slots, names, row)

    def _check_text(self, seed: int, choice: int, names: np.ndarray, read: int, row: int) -> None:
        texts = self._texts.get((seed, choice), [])
        if not texts or any(text.agrees(names) for text in texts):
            return
        fault = "is fed" if any(text.agrees(names[:read]) for text in texts) else "reads KV of"
        raise IntegrityError(f"row {row} {fault} tokens that are not its own")


class _Text:
    """Names of one request's KV by position."""

    def __init__(self, prompt_ids: np.ndarray, seed: int, choice: int, vocab_size: int):
        self._of = (seed, choice)
        self._vocab_size = vocab_size
        self._names = _continued(np.zeros(0, np.uint64), prompt_ids)

    def agrees(self, names: np.ndarray) -> bool:
        """Return whether all of `names` belong to this text."""
        if len(names) > len(self._names):
            more = token_at(*self._of, np.arange(len(self._names), 2 * len(names)), self._vocab_size)
            self._names = _continued(self._names, more)
        return np.array_equal(names, self._names[: len(names)])


class _Record:
    """The name of the entry in each slot of each page (0: empty), and of the entry before it in its text. in_force:
    pages that exist now."""

    def __init__(self, num_pages: int, extension_pages: int, page_size: int):
        self._page_size = page_size
        self.in_force = num_pages
        self._name = np.zeros((num_pages + extension_pages, page_size), np.uint64)
        self._before = np.zeros_like(self._name)

    def slots(self, page_table: np.ndarray, row: np.ndarray, position: np.ndarray) -> np.ndarray:
        """Return the slots, counted over all pages, of positions of rows. Raises IntegrityError where a page is not in
        force."""
        page = page_table[row, position // self._page_size]
        if len(page) and page.max() >= self.in_force:
            raise IntegrityError(f"page {page.max()} is none of the {self.in_force} that hold this model's KV")
        return page * self._page_size + position % self._page_size

    def read(self, slots: np.ndarray, row: np.ndarray, position: np.ndarray, held: np.ndarray) -> np.ndarray:
        """Return u64[slots], the names in the slots. Raises IntegrityError unless those that are held, a row's first
        ones, are one text."""
        names = self._name.reshape(-1)[slots]
        wrong = held & ((names == 0) | (self._before.reshape(-1)[slots] != _shifted(names, position)))
        if wrong.any():
            raise IntegrityError(f"row {row[wrong.argmax()]} reads KV that it did not write")
        return names

    def write(self, slots: np.ndarray, names: np.ndarray, position: np.ndarray, fed: np.ndarray) -> None:
        """Put the names that are fed in their slots."""
        self._name.reshape(-1)[slots[fed]] = names[fed]
        self._before.reshape(-1)[slots[fed]] = _shifted(names, position)[fed]

    def require_names(self, slots: np.ndarray, names: np.ndarray, row: np.ndarray) -> None:
        """Raise IntegrityError unless the slots hold these names."""
        wrong = self._name.reshape(-1)[slots] != names
        if wrong.any():
            raise IntegrityError(f"row {row[wrong.argmax()]} finds KV of another row among its own")

    def require_own(self, plan: StepPlan, ctx: np.ndarray, counts: np.ndarray) -> None:
        """Raise IntegrityError when a page that a row writes is read or written by another row of the step."""
        ends = -(-(ctx + counts) // self._page_size)
        held = np.concatenate([plan.page_table[row, : ends[row]] for row in range(plan.num_rows)])
        holders = np.bincount(held)
        for row in range(plan.num_rows):
            if (holders[plan.page_table[row, ctx[row] // self._page_size : ends[row]]] > 1).any():
                raise IntegrityError("two rows of one step hold the same page, and one of them writes it")

    def copy(self, from_pages: np.ndarray, to_pages: np.ndarray) -> None:
        for values in (self._name, self._before):
            values[to_pages] = values[from_pages]

    def clear(self, first_page: int) -> None:
        self._name[first_page:] = 0


def _shifted(names: np.ndarray, position: np.ndarray) -> np.ndarray:
    """Return for each name that of the position before it in its row, 0 at position 0."""
    return np.where(position == 0, np.uint64(0), np.roll(names, 1))


def _continued(names: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """`names` (u64[n]) of the first tokens of a text, and those of `tokens` behind them."""
    terms = kv_terms(tokens, np.arange(len(names), len(names) + len(tokens)))
    return np.concatenate([names, terms.cumsum(dtype=np.uint64) + (names[-1] if len(names) else np.uint64(0))])


def kv_terms(token_ids: np.ndarray, position: np.ndarray) -> np.ndarray:
    """u64[n], of tokens at positions (integers [n]): their sum from a text's first token to one of them stands for the
    KV of that one, since no two texts of a simulation share such a sum. Mixed by the last steps of splitmix64."""
    value = _u64(token_ids) * np.uint64(0xD1342543DE82EF95) + _u64(position) * np.uint64(0x9E3779B97F4A7C15)
    value += np.uint64(0xB4C665739B0215B1)
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return value ^ (value >> np.uint64(31))


def _u64(value: np.ndarray) -> np.ndarray:
    return np.atleast_1d(value).astype(np.uint64)
