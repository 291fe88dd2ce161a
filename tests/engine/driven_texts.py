"""Greedy texts driven by hand through an executor whose draft and KV pages change places."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from adaserve_jax.runtime.executor import ModelExecutor
from adaserve_jax.types import CandidateTrees, DraftPlan, DraftTrees, StepPlan
from tests.plans import i32, packed_trees, step_plan

PROMPTS = [[5, 9, 300, 17, 40, 41, 42, 43, 44, 45, 46, 47, 48, 3, 2, 1, 8, 9, 10], [7, 7, 250], [310, 12, 13, 14, 15]]
PAGE, BASE_PAGES, ROW_PAGES, TOKENS = 8, 20, 8, 24


@dataclass
class Texts:
    """Greedy requests driven by hand, one row each: their tokens, page tables and what the draft has of them."""

    executor: ModelExecutor
    tables: np.ndarray
    tokens: list[list[int]] = field(default_factory=lambda: [list(prompt) for prompt in PROMPTS])
    draft_ctx: np.ndarray = field(default_factory=lambda: np.zeros(len(PROMPTS), np.int32))
    steps: int = 0
    drafted: int = 0

    def prefill(self) -> None:
        plan = self._plan(np.zeros(len(PROMPTS), np.int32), prompts=True)
        self._take(plan, packed_trees([]))

    def decode(self, draft: bool) -> None:
        context = np.array([len(tokens) - 1 for tokens in self.tokens], np.int32)
        if not draft:
            plan = self._plan(context)
            self._take(plan, chains(plan, CandidateTrees.empty(len(PROMPTS))))
            return
        missing = [tokens[ctx:] for tokens, ctx in zip(self.tokens, self.draft_ctx, strict=True)]
        room = 32 - np.cumsum([0, *map(len, missing)])[:-1]  # rows that lag far catch up one after another
        fed = [each[: max(0, most)] for each, most in zip(missing, room, strict=True)]
        counts = np.array([len(each) for each in fed], np.int32)
        whole = np.array([len(a) == len(b) for a, b in zip(fed, missing, strict=True)])
        catchup = np.array([token for each in fed for token in each], np.int32)
        plan = self._plan(context, DraftPlan(2, 1, catchup, counts, self.draft_ctx, whole))
        candidates = self.executor.speculate(plan)
        self.draft_ctx = self.draft_ctx + counts
        trees = chains(plan, candidates)
        self.drafted += trees.num_nodes - len(PROMPTS)
        self._take(plan, trees)

    def _plan(self, context: np.ndarray, draft: DraftPlan | None = None, prompts: bool = False) -> StepPlan:
        decoding = [] if prompts else self.tokens
        self.steps += 1
        return step_plan(
            len(decoding), PROMPTS if prompts else [], step=self.steps, root_token=i32(t[-1] for t in decoding),
            ctx_len=context, page_table=self.tables, prefill_final=np.ones(len(PROMPTS) - len(decoding), bool),
            draft=draft, tree_token_cap=32,
        )  # fmt: skip

    def _take(self, plan: StepPlan, trees: DraftTrees) -> None:
        outcome = self.executor.verify(plan, trees)
        for row, tokens in enumerate(self.tokens):
            tokens += outcome.tokens[row, : outcome.counts[row]].tolist()

    def finished(self) -> list[list[int]]:
        """The first TOKENS of each row, after as many steps without the draft as they take."""
        while min(len(t) - len(p) for t, p in zip(self.tokens, PROMPTS, strict=True)) < TOKENS:
            self.decode(draft=False)
        return [t[len(p) : len(p) + TOKENS] for t, p in zip(self.tokens, PROMPTS, strict=True)]


def chains(plan: StepPlan, candidates: CandidateTrees) -> DraftTrees:
    """A root and the first candidate of each level, for every row."""
    trees = []
    for row in range(plan.num_decode):
        path = [int(plan.root_token[row])]
        if candidates.token.shape[1] and np.isfinite(candidates.log_f[row]).all():
            path += candidates.token[row].tolist()
        trees.append((path, range(-1, len(path) - 1)))
    return packed_trees(trees)


def base_tables() -> np.ndarray:
    """Pages of the base for all that a test writes, in no order."""
    pages = iter(np.random.default_rng(4).permutation(BASE_PAGES).tolist())
    return np.array([[next(pages) if at < most else 0 for at in range(ROW_PAGES)] for most in (8, 6, 6)], np.int32)


def plain(executor: ModelExecutor) -> list[list[int]]:
    """The texts without any swap, and without the draft."""
    texts = Texts(executor, base_tables())
    texts.prefill()
    return texts.finished()


def begun(executor: ModelExecutor) -> Texts:
    """Texts that the draft has a part in."""
    texts = Texts(executor, base_tables())
    texts.prefill()
    for _ in range(2):
        texts.decode(draft=True)
    assert texts.drafted
    return texts


def extended(texts: Texts) -> dict[int, int]:
    """Let each row's next page be one of the extension, and write into it and beyond it. Returns the moves back."""
    limits = texts.executor.limits
    beyond = limits.num_pages + limits.extension_pages
    moves = {}
    for row, page in enumerate((limits.num_pages, beyond - 1, beyond - 2)):
        at = -(-(len(texts.tokens[row]) - 1) // PAGE)
        moves[page], texts.tables[row, at] = int(texts.tables[row, at]), page
    for _ in range(PAGE + 2):
        texts.decode(draft=False)
    return moves


def moved(texts: Texts, moves: dict[int, int]) -> None:
    texts.executor.move_pages(np.array(list(moves)), np.array(list(moves.values())))
    texts.tables = np.vectorize(lambda page: moves.get(page, page))(texts.tables).astype(np.int32)


def drafted_to_the_end(texts: Texts) -> list[list[int]]:
    """With the draft again, whose KV is empty."""
    texts.draft_ctx[:] = 0
    before = texts.drafted
    for _ in range(4):
        texts.decode(draft=True)
    assert texts.drafted > before
    return texts.finished()
