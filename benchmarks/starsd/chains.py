"""What the real draft drafts at every place of texts that the real target wrote: a chain of tokens and its chances.

Kept in a file beside the texts. With it a run of a draft service can be replayed without the model: what a target takes
of a chain is what its text has.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from adaserve_jax.runtime.warmup import Effort
from adaserve_jax.star.messages import SessionSampling
from adaserve_jax.star.service.dispatch import DraftBatch, DraftBatchRow
from adaserve_jax.star.service.model import DraftModel, load
from adaserve_jax.star.settings import DraftServiceSettings
from benchmarks.starsd.targets import Text

QUICK = Effort((16,), passes=1, repeats=1, repeats_beyond=0, all_depths=False)
"""Its times are not asked for."""
FED = 16


@dataclass(frozen=True, eq=False)
class Chains:
    """token: i32[texts, places, levels], drafted behind prompt and so many tokens of the output; log_f: f32 of the same
    shape, of the path up to each."""

    token: np.ndarray
    log_f: np.ndarray


def chains_of(texts: Sequence[Text], kept: Path, *, levels: int, max_context: int) -> Chains:
    """Of every place of every text, from `kept` where it has those, else drafted by the embedded draft and written
    there. All outputs are as long as each other."""
    outputs = np.array([text.output for text in texts], np.int32)
    if kept.exists():
        held = np.load(kept)
        if np.array_equal(held["outputs"], outputs) and held["token"].shape[2] == levels:
            return Chains(held["token"], held["log_f"])
    model = load(
        DraftServiceSettings(
            model="demo", max_sessions=len(texts), max_batch=len(texts), max_batch_tokens=max(FED, len(texts)),
            max_context=max_context, max_depth=levels, max_width=1,
        ),
        effort=QUICK,
    )  # fmt: skip
    try:
        found = _draft(model, texts, levels, max_context)
    finally:
        model.close()
    np.savez(kept, outputs=outputs, token=found.token, log_f=found.log_f)
    return found


def _draft(model: DraftModel, texts: Sequence[Text], levels: int, max_context: int) -> Chains:
    whole = [np.array(text.prompt + text.output, np.int32) for text in texts]
    said = [SessionSampling(text.seed, 0, text.temperature, 0, 1.0, 0.0) for text in texts]

    def row(number: int, start: int, end: int, depth: int) -> DraftBatchRow:
        return DraftBatchRow("", number, 0, 0, number, start, whole[number][start:end], depth, said[number])

    for number, text in enumerate(texts):
        assert model.reserve(number, max_context)
        for start in range(0, len(text.prompt) - 1, FED):
            end = min(start + FED, len(text.prompt) - 1)
            model.run(DraftBatch((row(number, start, end, 0),), 0, 1, True, 0.0))
    tokens, log_fs = [], []
    for place in range(min(len(text.output) for text in texts)):
        ends = [len(text.prompt) + place for text in texts]
        rows = tuple(row(number, end - 1, end, levels) for number, end in enumerate(ends))
        trees = model.run(DraftBatch(rows, levels, 1, True, 0.0))
        assert trees is not None
        tokens.append(trees.token.copy())
        log_fs.append(trees.log_f.copy())
    return Chains(np.stack(tokens, axis=1), np.stack(log_fs, axis=1))
