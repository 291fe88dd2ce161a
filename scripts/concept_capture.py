"""What scripts/concept_figures.py draws: a step of the embedded pair, and pages as the pool hands them out.

No clock is in it, so that every machine makes the same pictures.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from adaserve_jax import LLM, EngineConfig, SamplingParams
from adaserve_jax.engine.thread_engine import LocalEngine
from adaserve_jax.memory.ledger import Ledger
from adaserve_jax.memory.page_pool import Migration, PagePool
from adaserve_jax.scheduler import selection
from adaserve_jax.sim.acceptance import AcceptanceRecorder, RecordingExecutor
from adaserve_jax.types import CandidateTrees, DraftTrees, Executor, StepPlan

PROMPTS = {
    "A": "def __init__(self, name):\n", "B": "Tom has 3 apples. He", "C": "for name in names:\n",
    "D": "import os\nimport sys\n",
}  # fmt: skip
NEEDS = (2.0, 2.6, 1.6, 0.0)
"""Tokens that A to D must gain in the step; D has no target."""
NEW_TOKENS = 40
OPTIONS = {
    "policy": "adaserve-paper", "max_requests": 4, "max_context": 256, "page_size": 16, "num_pages": 48, "max_depth": 4,
    "max_width": 3, "eq9_c2": 2, "max_tree_tokens": 24, "token_edges": (24, 64), "row_edges": (4,),
    "elastic": "off",
}  # fmt: skip


class Watch(RecordingExecutor):
    """Keeps the plan and the candidates of every step in which all requests draft."""

    def __init__(self, executor: Executor, steps: list[tuple[StepPlan, CandidateTrees]]):
        super().__init__(executor, AcceptanceRecorder())
        self._steps = steps

    def speculate(self, plan: StepPlan) -> CandidateTrees:
        candidates = super().speculate(plan)
        if plan.num_decode == plan.num_rows == len(PROMPTS) and candidates.token.shape[1]:
            self._steps.append((plan, candidates))
        return candidates


@dataclass(frozen=True)
class Step:
    """One step. taken: i64[R], candidates of the SLO phase; accepted: bool[N], per node of the trees; bonus: the token
    that the target adds to each row; piece: a token's text, by id."""

    plan: StepPlan
    candidates: CandidateTrees
    ranked: selection.Ranked
    taken: np.ndarray
    chosen: np.ndarray
    trees: DraftTrees
    accepted: np.ndarray
    bonus: tuple[int, ...]
    piece: dict[int, str]

    @property
    def emitted(self) -> list[int]:
        """Tokens that each row gains, the bonus included."""
        return np.bincount(self.trees.row, self.accepted, len(PROMPTS)).astype(int).tolist()

    def refused(self, row: int) -> int:
        """Nodes of a row that were verified in vain."""
        return int(np.count_nonzero((self.trees.row == row) & ~self.accepted))


def capture() -> tuple[Step, Ledger]:
    """Serve PROMPTS together; of the steps, the one in which all drafts say something; and the engine's ledger, as if
    the draft's memory could become pages."""
    seen: list[tuple[StepPlan, CandidateTrees]] = []
    engine = LocalEngine(EngineConfig(**OPTIONS), observe=lambda executor: Watch(executor, seen))
    engine.start()
    with LLM.over(engine) as llm:
        sampling = [
            SamplingParams(max_tokens=NEW_TOKENS, temperature=0.0, ignore_eos=True, seed=row)
            for row in range(len(NEEDS))
        ]
        outputs = llm.generate(list(PROMPTS.values()), sampling)
        texts = [[*output.prompt_token_ids, *output.token_ids] for output in outputs]
        vocabulary = {token for _, candidates in seen for token in candidates.token.ravel().tolist()}
        piece = {token: llm.tokenizer.decode([token]) for token in vocabulary.union(*texts)}
        ledger = engine.executor.ledger
    steps = [_step(plan, candidates, texts, piece) for plan, candidates in seen]
    more = ledger.sizes.extension_pages(ledger.num_pages)
    return max(steps, key=_worth), replace(ledger, extension_pages=more)


def _step(plan: StepPlan, candidates: CandidateTrees, texts: list[list[int]], piece: dict[int, str]) -> Step:
    """Algorithm 2 with NEEDS, then the walk along what the target says."""
    rows = np.argsort(plan.sampling.seed)
    assert rows.tolist() == list(range(len(rows))), "requests run in the order in which they came"
    ranked = selection.rank(candidates)
    need = np.array(NEEDS)
    taken = selection.slo_phase(ranked.f, need, budget=plan.tree_token_cap)
    chosen = selection.throughput_phase(ranked, taken, plan.tree_token_cap - len(need) - int(taken.sum()))
    trees = selection.pack(candidates, plan.root_token, ranked, chosen)
    accepted = np.zeros(trees.num_nodes, bool)
    bonus = []
    for row, text in enumerate(texts):
        node, place = int(np.flatnonzero((trees.row == row) & (trees.parent < 0))[0]), int(plan.ctx_len[row])
        while True:
            accepted[node] = True
            place += 1
            following = np.flatnonzero((trees.parent == node) & (trees.token == text[place]))
            if place + 1 == len(text) or not len(following):
                break
            node = int(following[0])
        bonus.append(text[place])
    return Step(plan, candidates, ranked, taken, chosen, trees, accepted, tuple(bonus), piece)


def _worth(step: Step) -> float:
    """Return the tokens that the request with the least can expect: a step in which every draft has something to
    say."""
    return float(step.ranked.f.sum(axis=1).min())


@dataclass(frozen=True)
class Pages:
    """A pool at one moment. holder: by page id, a request's name, "" where free; base: pages of the base slab."""

    title: str
    holder: tuple[str, ...]
    base: int


def pages_over_time(base: int = 24, extension: int = 10) -> tuple[list[Pages], Migration]:
    """Pages of three requests from the draft's leaving to its return, and the moves in between."""
    pool = PagePool(base, 16, extension)
    held = {"A": pool.alloc(9), "B": pool.alloc(8), "C": pool.alloc(5)}
    seen = [_pages(pool, held, "The draft is here: requests hold pages of the base slab")]
    pool.extend()
    held["B"] = np.concatenate([held["B"], pool.alloc(3)])
    held["C"] = np.concatenate([held["C"], pool.alloc(4)])
    seen.append(_pages(pool, held, "It is away: its memory is the extension slab, from page K on"))
    pool.free(held.pop("A"))
    seen.append(_pages(pool, held, "A has ended: what is live above K moves below it"))
    migration = pool.plan_contraction()
    assert migration is not None
    remap = migration.remap(pool.total_pages)
    pool.publish(migration)
    pool.trim()
    held = {name: remap[pages] for name, pages in held.items()}
    seen.append(_pages(pool, held, "The slab is freed, and the draft comes back"))
    pool.check_integrity()
    return seen, migration


def _pages(pool: PagePool, held: dict[str, np.ndarray], title: str) -> Pages:
    holder = [""] * pool.pages_in_force
    for name, pages in held.items():
        for page in pages.tolist():
            holder[page] = name
    return Pages(title, tuple(holder), pool.base_pages)
