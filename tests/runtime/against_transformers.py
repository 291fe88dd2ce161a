"""Compares a model behind a packed program with transformers' logits: chunked prefill over 600 tokens, and trees."""

from __future__ import annotations

from typing import Any

import numpy as np

from adaserve_jax.runtime.model import DeviceModel
from tests.models.torch_checkpoints import VOCABULARY, torch_logits
from tests.runtime.packed_model import LENGTH, TREE_PARENTS, TREE_TOKENS, plan_of, run, trees

CHUNKS = (1, 7, 63, 96, 96, 41, 96, 96, 96, 8)


def largest_error(model: DeviceModel, theirs: Any) -> float:
    """The largest difference of any logit of 600 tokens in chunks, and of trees after 1, 71 and all of them."""
    sequence = np.random.default_rng(1).integers(2, VOCABULARY, LENGTH).tolist()
    expected = torch_logits(theirs, sequence)
    assert expected.std() > 0.5
    start, errors = 0, []
    for size in CHUNKS:
        stop = start + size
        scores = run(model, plan_of(start, sequence[start:stop]), trees([], []))[:size]
        errors.append(np.abs(scores - expected[start:stop]).max())
        start = stop
        if start in (1, 71, LENGTH):
            errors.append(tree_error(model, theirs, sequence[:start]))
    assert start == LENGTH
    return max(errors)


def tree_error(model: DeviceModel, theirs: Any, context: list[int]) -> float:
    """Largest difference of any node to its own path, decoded plainly after the context."""
    scores = run(model, plan_of(len(context), []), trees(TREE_TOKENS, TREE_PARENTS))[: len(TREE_TOKENS)]
    return np.abs(scores - tree_logits(theirs, context)).max()


def tree_logits(theirs: Any, context: list[int]) -> np.ndarray:
    """f32[nodes, V]: what transformers gives after each node of the tree, its path a text of its own."""
    nodes = []
    for node in range(len(TREE_TOKENS)):
        path, at = [], node
        while at >= 0:
            path.append(TREE_TOKENS[at])
            at = TREE_PARENTS[at]
        nodes.append(torch_logits(theirs, context + path[::-1])[-1])
    return np.array(nodes)
