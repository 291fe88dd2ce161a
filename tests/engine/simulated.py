"""A simulated machine for tests of the engine: text that is a pure function, and what plain decoding makes of it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np

from adaserve_jax.config import EngineConfig
from adaserve_jax.engine.client import GenerateRequest
from adaserve_jax.errors import UnsupportedModelError
from adaserve_jax.sim.executor import VirtualClock
from adaserve_jax.sim.text import token_at
from adaserve_jax.types import CostSamples, DraftTrees, Limits, LogitEdits, StepOutcome, StepPlan
from tests.sim_kv import StrictExecutor

VOCAB = 40
EOS = 0


def limits_of(**changes: int | tuple[int, ...]) -> Limits:
    """A small machine whose pages run out."""
    values = {
        "max_requests": 4,
        "token_edges": (1, 4, 8, 16),
        "max_tree_tokens": 12,
        "max_context": 48,
        "page_size": 4,
        "num_pages": 20,
        "max_depth": 3,
        "max_width": 2,
    }
    return Limits(**{**values, **changes})  # type: ignore[arg-type]


def costs_of(limits: Limits) -> CostSamples:
    """10 ms and 0.1 ms a token, so that speculation pays; a draft of a tenth of that."""
    verify = {(edge, 4): 0.01 + 1e-4 * edge for edge in limits.token_edges}
    levels = {(4, width): 1e-3 for width in (1, limits.max_width)}
    return CostSamples(verify, {8: 1e-3, 16: 1e-3}, levels)


class Machine(StrictExecutor):
    """What `load_executor` gives, simulated. Before each verification it calls `before_step`."""

    def __init__(self, config: EngineConfig, **limits: int):
        self.before_step: Callable[[], object] = lambda: None
        self.closed = 0
        self.leaves_host_free = False
        super().__init__(limits_of(**limits), costs_of(limits_of(**limits)), 0.7, VirtualClock(), vocab_size=VOCAB)
        changes = {"max_context": self.limits.max_context, "num_pages": self.limits.num_pages, "max_requests": 4}
        self.resolved = SimpleNamespace(
            config=replace(config, page_size=8, **changes), draft_vocabulary="", synthetic=None
        )
        self.target = SimpleNamespace(config=SimpleNamespace(eos_token_ids=(EOS,), vocab_size=VOCAB))
        self.target_folder = Path("no checkpoint")
        self.drafter = None
        self.chances = None

    def verify(
        self, plan: StepPlan, trees: DraftTrees, edits: LogitEdits | None = None,
        meanwhile: Callable[[], None] | None = None,
    ) -> StepOutcome:  # fmt: skip
        self.before_step()
        return super().verify(plan, trees, edits, meanwhile)

    def close(self) -> None:
        self.closed += 1


class Spelling:
    """A tokenizer: ids 0 and 1 are special, each other id spells one to three letters."""

    eos_token_ids = (EOS,)
    longest_token = 3
    chat_template = ""

    def id_of(self, text: str) -> int | None:
        return None

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [2 + ord(character) % (VOCAB - 2) for character in text]

    def spell(self, text: str) -> list[int]:
        return self.encode(text)

    def backend_json(self, rows: int | None = None) -> str:
        raise UnsupportedModelError("letters: no grammar reads this tokenizer")

    def vocabulary_hash(self, rows: int) -> str:
        return f"letters-{rows}"

    def decode(self, token_ids: Sequence[int]) -> str:
        return "".join("abcde"[i % 5] + "xy"[: i % 3] for i in token_ids if self.has_text(i))

    def has_text(self, token_id: int) -> bool:
        return token_id > 1

    def showing(self, texts: Collection[str]) -> Spelling:
        return self


@dataclass(frozen=True)
class Expected:
    """What plain decoding emits for one choice."""

    token_ids: list[int]
    text: str
    finish_reason: str


def expected(request: GenerateRequest, choice: int, seed: int, max_context: int) -> Expected:
    """From the definition of the simulated target and of the sampling parameters alone, one character at a time."""
    sampling, spelling = request.sampling, Spelling()
    start = len(request.prompt_ids)
    end = min(start + sampling.max_tokens, max_context)
    ends = set(sampling.stop_token_ids) | (set() if sampling.ignore_eos else {EOS})
    tokens, text = [], ""
    for token in token_at(seed, choice, np.arange(start, end), VOCAB).tolist():
        tokens.append(token)
        for character in spelling.decode([token]):
            text += character
            found = [stop for stop in sampling.stop if text.endswith(stop)]
            if found:
                return Expected(tokens, text[: -len(max(found, key=len))], "stop")
        if token in ends:
            return Expected(tokens, text, "stop")
    return Expected(tokens, text, "length")
