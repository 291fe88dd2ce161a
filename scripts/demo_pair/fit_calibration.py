"""Fit the chance that the target takes a child, as the draft's beam search sees it, and write calibration.json.

The text is the target's own, sampled after held-out prompts with known Gumbel noise, so every position is a node whose
context the target produced. A node's children are the draft's four best by score s (coupled: log q + g at the request's
temperature; greedy: log q); a child's feature x is its gap to the best other child (coupled) or log q (greedy). A cell
[depth][rank][bin] is the isotonic fit of P(target's token == child | x), the bin the number of edges <= x. Depth
index j (from 0) uses the nodes whose j previous tokens were themselves among their nodes' children.
"""

import argparse
import dataclasses
import json
from pathlib import Path

import numpy as np
import torch
from pair import DEMO, Pair, gumbel, held_out_texts, load_pair, sample, windows
from torch import Tensor

RANKS, DEPTHS, BINS = 4, 8, 24
FEWEST_NODES = 25
TEMPERATURES = (0.5, 0.6, 0.7, 0.85, 1.0, 1.2)
PROMPT_TOKENS, NEW_TOKENS = 64, 192
KINDS = {"lib": 0.5, "maths": 0.25, "maths_chat": 0.25}


@dataclasses.dataclass(frozen=True)
class Nodes:
    """Observed nodes. x: f32[N, 4], features by rank; hit: bool[N, 4], the target's token is this child; depth: i64[N],
    how many tokens before this one, in a row, were children (at most 7); half: i64[N], 0 to fit, 1 to judge."""

    x: np.ndarray
    hit: np.ndarray
    depth: np.ndarray
    half: np.ndarray

    @staticmethod
    def join(parts: list["Nodes"]) -> "Nodes":
        """Return all the nodes of the parts."""
        fields = [field.name for field in dataclasses.fields(Nodes)]
        return Nodes(*(np.concatenate([getattr(part, name) for part in parts]) for name in fields))


@torch.inference_mode()
def observe(pair: Pair, prompts: Tensor, *, temperature: float, seed: int) -> Nodes:
    """Let the target continue the prompts and return what the draft would have offered at every position."""
    tokens = sample(pair.target, prompts, NEW_TOKENS, temperature=temperature, seed=seed)
    start = prompts.shape[1]
    draft = torch.cat([pair.draft(rows[:, :-1], use_cache=False).logits[:, start - 1 :] for rows in tokens.split(16)])
    scores = draft.div(temperature or 1.0).log_softmax(-1)
    if temperature > 0:
        shape = (scores.shape[0], scores.shape[2])
        for step in range(NEW_TOKENS):
            scores[:, step] += gumbel(shape, seed + step)
    best, ids = scores.topk(RANKS)
    rest = torch.cat([best[..., 1:2], best[..., :1].expand(*best.shape[:2], RANKS - 1)], -1)
    hit = ids == tokens[:, start:, None]
    run = torch.zeros(len(tokens), dtype=torch.long)
    depth = torch.empty(hit.shape[:2], dtype=torch.long)
    for step in range(NEW_TOKENS):
        depth[:, step] = run
        run = torch.where(hit[:, step].any(-1), (run + 1).clamp_max(DEPTHS - 1), 0)
    half = (torch.arange(len(tokens)) % 2)[:, None].expand(depth.shape)
    x = best - rest if temperature > 0 else best
    return Nodes(x.flatten(0, 1).numpy(), hit.flatten(0, 1).numpy(), depth.flatten().numpy(), half.flatten().numpy())


def isotonic(value: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """Return the non-decreasing f64[E] nearest to `value` in weighted squares (pool adjacent violators).

    A bin of weight 0 takes its left neighbour's value (the first ones, their right neighbour's).
    """
    blocks: list[tuple[float, float, int]] = []
    for new_value, new_weight in zip(value, weight, strict=True):
        block = (float(new_value), float(new_weight), 1)
        while blocks and (blocks[-1][1] == 0 or block[1] == 0 or blocks[-1][0] > block[0]):
            left = blocks.pop()
            total = left[1] + block[1]
            mean = (left[0] * left[1] + block[0] * block[1]) / total if total else 0.0
            block = (mean, total, left[2] + block[2])
        blocks.append(block)
    return np.concatenate([np.full(count, mean) for mean, _, count in blocks])


def edges_of(x: np.ndarray, count: int) -> np.ndarray:
    """Return at most `count` increasing edges that share x out evenly."""
    return np.unique(np.quantile(x, np.linspace(0, 1, count + 2)[1:-1]).round(4))


def fit(nodes: Nodes, edges: np.ndarray) -> np.ndarray:
    """Return f64[DEPTHS, RANKS, E], chances fitted on one half; a bin of fewer than FEWEST_NODES counts as empty."""
    table = np.empty((DEPTHS, RANKS, len(edges) + 1))
    bins = np.searchsorted(edges, nodes.x, side="right")
    for depth in range(DEPTHS):
        used = (nodes.half == 0) & (nodes.depth >= depth)
        for rank in range(RANKS):
            weight = np.bincount(bins[used, rank], minlength=len(edges) + 1)
            hits = np.bincount(bins[used, rank], weights=nodes.hit[used, rank], minlength=len(edges) + 1)
            table[depth, rank] = isotonic(hits / np.maximum(weight, 1), np.where(weight < FEWEST_NODES, 0, weight))
    return table.round(4)


def expected_error(chance: np.ndarray, hit: np.ndarray) -> float:
    """Return the expected calibration error over 20 equal intervals of the stated chance."""
    bins = np.minimum((chance * 20).astype(int), 19)
    gap = np.bincount(bins, weights=chance - hit, minlength=20)
    return round(float(np.abs(gap).sum() / len(chance)), 5)


def stated(table: np.ndarray, edges: np.ndarray, nodes: Nodes, depth: int) -> np.ndarray:
    """Return f64[N, 4], what the table says of these nodes at this depth."""
    return table[depth][np.arange(RANKS), np.searchsorted(edges, nodes.x, side="right")]


def judge(table: np.ndarray, edges: np.ndarray, nodes: Nodes) -> float:
    """Return the mean over depths of the expected calibration error on the half not fitted."""
    errors = []
    for depth in range(DEPTHS):
        used = (nodes.half == 1) & (nodes.depth >= depth)
        errors.append(expected_error(stated(table, edges, nodes, depth)[used].ravel(), nodes.hit[used].ravel()))
    return round(float(np.mean(errors)), 5)


def prompts_of(pair: Pair, texts: dict[str, list[str]], count: int) -> Tensor:
    """Return i64[about count, PROMPT_TOKENS] of held-out text, the kinds mixed so that both halves see each."""
    parts = [
        windows(pair, texts[kind], length=PROMPT_TOKENS - 1, limit=int(count * share)) for kind, share in KINDS.items()
    ]
    return torch.cat(parts)


def main() -> None:
    """Parse the command line, sample, fit and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gsm8k", type=Path, required=True, help="GSM8K's train.jsonl.gz")
    parser.add_argument("--pair", type=Path, default=DEMO)
    parser.add_argument("--sequences", type=int, default=64, help="sequences for each temperature, and a batch")
    args = parser.parse_args()
    pair = load_pair(args.pair)
    texts = held_out_texts(args.gsm8k)
    prompts = prompts_of(pair, texts, args.sequences)
    coupled = Nodes.join(
        [observe(pair, prompts, temperature=t, seed=10_000 * i) for i, t in enumerate(TEMPERATURES, start=1)]
    )
    more = prompts_of(pair, texts, args.sequences * 3)
    greedy = Nodes.join([observe(pair, rows, temperature=0.0, seed=0) for rows in more.split(args.sequences)])
    positive, negative = edges_of(coupled.x[:, 0], BINS // 2 - 1), edges_of(coupled.x[:, 1:], BINS // 2 - 1)
    edges = {
        "coupled": np.unique(np.concatenate([negative, [0.0], positive])),
        "greedy": edges_of(greedy.x, BINS - 1),
    }
    result: dict = {"version": 1}
    errors: dict[str, float] = {}
    for name, nodes in (("coupled", coupled), ("greedy", greedy)):
        table = fit(nodes, edges[name])
        result[name] = {"edges": edges[name].tolist(), "table": table.tolist()}
        errors[name] = judge(table, edges[name], nodes)
    judged = greedy.half == 1
    errors["greedy_uncalibrated"] = expected_error(np.exp(greedy.x[judged]).ravel(), greedy.hit[judged].ravel())
    result["ece"] = errors
    (args.pair / "calibration.json").write_text(json.dumps(result) + "\n", encoding="utf-8")
    print(json.dumps(errors))


if __name__ == "__main__":
    main()
