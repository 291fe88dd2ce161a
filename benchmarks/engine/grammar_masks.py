"""What structured output costs the host: preparing schemas, and masks per node of a tree.

    python -m benchmarks.engine.grammar_masks

Two vocabularies: the embedded pair's, and random pieces as many as today's models have. The texts are random allowed
tokens. Nothing is committed.
"""

from __future__ import annotations

import json
import random
import time

import numpy as np
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from adaserve_jax.constraints.grammar import Grammars
from adaserve_jax.models.config import resolve_folder
from adaserve_jax.models.tokenizer import Tokenizer

LARGE_VOCABULARY = 151_936
TREE, STEPS, TIMES = 16, 60, 5
LETTERS = 'etaoinshrdlucmfwypvbgkjqxzETAOINSHRDLU0123456789_.,:"{}[]-'
SCHEMAS = {
    "any object": {"type": "object"},
    "person": {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 40},
            "born": {"type": "integer", "minimum": 0, "maximum": 2100},
            "mail": {"type": "string", "format": "email"},
            "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "maxItems": 3},
        },
        "required": ["name", "born", "mail", "tags"],
        "additionalProperties": False,
    },
}


class Pieces:
    """A tokenizer of single bytes and random pieces, the end of text first."""

    def __init__(self, vocab_size: int):
        rng, end = random.Random(0), "<|endoftext|>"
        pieces = dict.fromkeys([end, *sorted(pre_tokenizers.ByteLevel.alphabet())])
        while len(pieces) < vocab_size:
            space = "Ġ" if rng.random() < 0.5 else ""
            pieces[space + "".join(rng.choices(LETTERS, k=rng.randint(2, 8)))] = None
        self._backend = Backend(models.BPE(vocab={piece: i for i, piece in enumerate(pieces)}, merges=[]))
        self._backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        self._backend.decoder = decoders.ByteLevel()
        self._backend.add_special_tokens([AddedToken(end, special=True)])

    def backend_json(self) -> str:
        return self._backend.to_str()


def ids_of(mask: np.ndarray) -> np.ndarray:
    return np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))


def measure(grammars: Grammars, schema: dict[str, object], num_words: int) -> tuple[list[float], list[float]]:
    """Seconds to prepare the schema, each time anew, and this thread's seconds per node of trees of allowed tokens."""
    text, rng = json.dumps(schema), np.random.default_rng(0)
    checks, nodes = [], []
    for again in range(TIMES):
        began = time.perf_counter()
        grammars.prepare(text + " " * again).result()
        checks.append(time.perf_counter() - began)
    start = grammars.prepare(text).result()
    grammars.add("text", start)
    for _ in range(STEPS):
        tokens, parents = np.zeros(TREE, np.int32), np.full(TREE, -1, np.int32)
        masks = np.zeros((TREE, num_words), np.uint32)
        for node in range(1, TREE):
            grammars.fill("text", tokens[:node], parents[:node], masks[:node])
            parents[node] = rng.integers(max(0, node - 4), node)
            tokens[node] = rng.choice(ids_of(masks[parents[node]]))
        began = time.thread_time()
        grammars.fill("text", tokens, parents, masks)
        nodes.append((time.thread_time() - began) / TREE)
        if grammars.advance("text", [int(rng.choice(ids_of(masks[0])))]):
            grammars.add("text", start)
    return checks, nodes


def main() -> None:
    demo = Tokenizer.from_folder(resolve_folder("demo", "target"))
    for tokenizer, vocab_size in ((demo, demo.vocab_size), (Pieces(LARGE_VOCABULARY), LARGE_VOCABULARY)):
        began = time.perf_counter()
        grammars = Grammars(tokenizer.backend_json(), vocab_size, (0,))
        print(f"V = {vocab_size}: tokenizer read in {time.perf_counter() - began:.2f} s")
        for name, schema in SCHEMAS.items():
            checks, nodes = measure(grammars, schema, -(-vocab_size // 32))
            median, high = np.quantile(nodes, (0.5, 0.9)) * 1e6
            print(
                f"  {name}: prepared in {1e3 * np.median(checks):.1f} ms (most {1e3 * max(checks):.1f}); "
                f"{median:.0f} us of CPU per node (p90 {high:.0f}) of trees of {TREE}"
            )


if __name__ == "__main__":
    main()
