"""Texts for paced targets: what the real target makes of prompts that the demo pair never saw, kept in a file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from adaserve_jax import LLM, SamplingParams
from adaserve_jax.models.config import resolve_folder
from adaserve_jax.models.held_out import held_out_code
from adaserve_jax.models.tokenizer import Tokenizer
from adaserve_jax.results.provenance import model_hash
from benchmarks.engine.throughput_prompts import Prompts
from benchmarks.starsd.targets import Text, texts_as_json, texts_from_json

AT_ONCE = 16


def texts_of(
    target: str, kept: Path, *, count: int, new_tokens: int, temperature: float, max_context: int, seed: int = 0
) -> list[Text]:
    """`count` texts of new_tokens each, from `kept` where it holds those, else generated and written there."""
    folder = resolve_folder(target, "target")
    asked: dict[str, Any] = {
        "target": model_hash(folder), "count": count, "new_tokens": new_tokens, "temperature": temperature, "seed": seed
    }  # fmt: skip
    if kept.exists():
        saved = json.loads(kept.read_text())
        if saved["asked"] == asked:
            return texts_from_json(saved["texts"])
    prompts = Prompts(held_out_code(), Tokenizer.from_folder(folder).encode).cut(count, (seed, 9))
    sampling = [
        SamplingParams(max_tokens=new_tokens, temperature=temperature, seed=seed + number, ignore_eos=True)
        for number in range(count)
    ]
    llm = LLM(str(folder), None, "ar", max_requests=AT_ONCE, max_context=max_context, dtype="f32")
    try:
        outputs = llm.generate(prompts, sampling)
    finally:
        llm.close()
    texts = [
        Text(tuple(prompt), tuple(output.token_ids), each.seed or 0, temperature)
        for prompt, output, each in zip(prompts, outputs, sampling, strict=True)
    ]
    kept.write_text(json.dumps({"asked": asked, "texts": texts_as_json(texts)}) + "\n")
    return texts
