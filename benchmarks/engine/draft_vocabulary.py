"""Acceptance of the embedded draft with another vocabulary than its target's: permuted, and with tokens taken away.

Tokens are taken from the draft's tokenizer and its embedding, at random among those that merges make, and the rest get
other ids. Nothing is trained again, so a row shows what the map alone costs. Texts are compared with those of the
target alone; in deterministic mode none may differ.
"""

from __future__ import annotations

import json
import shlex
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from safetensors.numpy import load_file, save_file

from adaserve_jax import LLM, SamplingParams
from adaserve_jax.cli.terminal import progress_bar
from adaserve_jax.errors import ConfigError
from adaserve_jax.models.config import ModelConfig, resolve_folder
from adaserve_jax.models.held_out import held_out_code
from adaserve_jax.models.tokenizer import Tokenizer
from adaserve_jax.models.vocabulary_map import map_vocabulary
from adaserve_jax.results.provenance import machine_name, source_commit
from benchmarks import program

TEMPERATURES = (0.0, 0.8)
OPTIONS: dict[str, Any] = {
    "deterministic": True, "max_requests": 16, "max_context": 512, "page_size": 16, "num_pages": 512, "max_depth": 4,
    "max_width": 1, "max_batch_tokens": 128,
}  # fmt: skip


@dataclass(frozen=True)
class Point:
    """One draft. removed: share of its merged tokens that were taken away; None: the draft as it is. covered: share of
    the target's tokens; covered_text: of the tokens of the texts that the target writes at temperature 0. accepted:
    share of drafted tokens, by temperature. differing: texts that differ from the target's own."""

    removed: float | None
    mapping: str
    covered: float
    covered_text: float
    accepted: dict[str, float]
    differing: int


def write_draft(folder: Path, removed: float, seed: int) -> Path:
    """Write the embedded draft with a part of its merged tokens removed and the ids of the others permuted."""
    source = resolve_folder("demo", "draft")
    for file in source.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    whole = json.loads((source / "tokenizer.json").read_text())
    vocabulary: dict[str, int] = whole["model"]["vocab"]
    rng = np.random.default_rng(seed)
    specials = 1 + max(token["id"] for token in whole["added_tokens"])
    first_merged = len(vocabulary) - len(whole["model"]["merges"])
    merged = rng.permutation(np.arange(first_merged, len(vocabulary)))
    kept = np.setdiff1d(np.arange(specials, len(vocabulary)), merged[: int(removed * len(merged))])
    old_ids = np.concatenate([np.arange(specials), rng.permutation(kept)])
    token_of = {token_id: token for token, token_id in vocabulary.items()}
    whole["model"]["vocab"] = new = {token_of[old]: place for place, old in enumerate(old_ids.tolist())}
    pairs = [pair.split(" ") if isinstance(pair, str) else pair for pair in whole["model"]["merges"]]
    whole["model"]["merges"] = [pair for pair in pairs if {*pair, "".join(pair)} <= new.keys()]
    (folder / "tokenizer.json").write_text(json.dumps(whole))
    tensors = load_file(source / "model.safetensors")
    for name in tensors.keys() & {"model.embed_tokens.weight", "lm_head.weight"}:
        tensors[name] = np.ascontiguousarray(tensors[name][old_ids])
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((source / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"vocab_size": len(old_ids)}))
    return folder


def measure(draft: Path, removed: float | None, prompts: list[str], tokens: int) -> Point:
    """Generate with one draft, and again without speculation."""
    folders = (resolve_folder("demo", "target"), draft)
    rows = (ModelConfig.from_folder(folder).vocab_size for folder in folders)
    found = map_vocabulary(*(Tokenizer.from_folder(folder) for folder in folders), *rows)
    accepted: dict[str, float] = {}
    differing, written = 0, np.zeros(0, np.int64)
    with LLM("demo", str(draft), policy="spec:4", **OPTIONS) as llm:
        for temperature in TEMPERATURES:
            sampling = [
                SamplingParams(max_tokens=tokens, temperature=temperature, seed=seed, ignore_eos=True)
                for seed in range(len(prompts))
            ]
            llm.set_policy("spec:4")
            outputs = llm.generate(prompts, sampling)
            drafted = sum(output.metrics.drafted_tokens for output in outputs)
            accepted[str(temperature)] = sum(output.metrics.accepted_tokens for output in outputs) / drafted
            llm.set_policy("ar")
            alone = llm.generate(prompts, sampling)
            differing += sum(a.token_ids != b.token_ids for a, b in zip(outputs, alone, strict=True))
            if temperature == 0:
                written = np.concatenate([output.token_ids for output in alone])
    return Point(removed, found.kind, found.share, float(found.covered[written].mean()), accepted, differing)


def main(
    out: Annotated[Path, typer.Option(help="JSON file to write")],
    removed: Annotated[str, typer.Option(help="shares of the draft's merged tokens to take away")] = "0,0.15,0.4",
    texts: Annotated[int, typer.Option(help="held-out files to begin")] = 16,
    tokens: Annotated[int, typer.Option(help="tokens to write after each")] = 64,
) -> None:
    """Measure acceptance of the embedded draft as it is, permuted, and with tokens taken away."""
    prompts = [text[:400] for text in held_out_code()[:texts]]
    if len(prompts) < texts:
        raise ConfigError(f"--texts must be at most {len(prompts)}, the held-out files of this Python, got {texts}")
    points = []
    shares = [None, *map(float, removed.split(","))]
    with progress_bar() as progress, tempfile.TemporaryDirectory() as scratch:
        for done, share in enumerate(shares):
            progress("measuring", done, len(shares))
            folder = resolve_folder("demo", "draft")
            if share is not None:
                made = Path(scratch) / str(done)
                made.mkdir()
                folder = write_draft(made, share, seed=0)
            points.append(measure(folder, share, prompts, tokens))
    result = {
        "commit": source_commit(), "machine": machine_name(),
        "command": shlex.join(["python", "-m", "benchmarks.engine.draft_vocabulary", *sys.argv[1:]]),
        "texts": texts, "tokens": tokens, "points": [asdict(point) for point in points],
    }  # fmt: skip
    out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    program.run(main)
