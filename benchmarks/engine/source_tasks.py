"""Tasks whose texts repeat and tasks whose texts do not: prompts with the references that a target should write."""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from adaserve_jax.models.held_out import held_out_code
from adaserve_jax.workloads.workload import load_workload


@dataclass(frozen=True)
class Item:
    """One request. reference: text to write; "": the target writes its own."""

    prompt: str
    reference: str = ""


def tasks(data: Path | None, count: int, seed: int) -> dict[str, list[Item]]:
    """Return `count` items of every task by name; those of real data where `data`, a folder, has them."""
    rng = np.random.default_rng(seed)
    found = {
        "code edit": code_edits(count, rng),
        "JSON records": json_records(count, rng),
        "open text": [Item(each.prompt) for each in load_workload().items if isinstance(each.prompt, str)][:count],
    }
    if data is not None:
        questions = _lines(data / "spec-bench" / "question.jsonl.gz")
        by_kind: dict[str, list[dict[str, Any]]] = {}
        for question in questions:
            by_kind.setdefault(question["category"], []).append(question)
        found["quoting summary"] = [quoting_summary(each["turns"][0]) for each in by_kind["summarization"][:count]]
        for kind in ("summarization", "translation", "rag", "math_reasoning"):
            found[f"Spec-Bench {kind}"] = [_answered(each) for each in by_kind[kind][:count]]
        chats = [each for kind in ("coding", "math", "reasoning") for each in by_kind[kind] if each.get("reference")]
        found["chat, second turn"] = [second_turn(each) for each in chats[:count]]
        problems = _lines(data / "human-eval" / "HumanEval.jsonl.gz")[:count]
        found["HumanEval"] = [Item(each["prompt"], each["canonical_solution"]) for each in problems]
        sums = _lines(data / "gsm8k" / "train.jsonl.gz")[:count]
        found["GSM8K"] = [Item(f"Question: {each['question']}\nAnswer: ", each["answer"]) for each in sums]
    return found


def code_edits(count: int, rng: np.random.Generator, chars: int = 1200) -> list[Item]:
    """Return pieces of Python files with the instruction to rename a name, and the renamed piece as the reference."""
    found: list[Item] = []
    files = [text for text in held_out_code() if len(text) > 2 * chars]
    while len(found) < count:
        lines = files[int(rng.integers(len(files)))].splitlines(keepends=True)
        start = int(rng.integers(len(lines)))
        piece = ""
        for line in lines[start:]:
            if len(piece) + len(line) > chars:
                break
            piece += line
        names = [name for name in re.findall(r"\b[a-z_]{4,}\b", piece) if piece.count(name) >= 3]
        if len(piece) < chars // 2 or not names:
            continue
        name = names[int(rng.integers(len(names)))]
        edited = re.sub(rf"\b{name}\b", f"{name}_all", piece)
        found.append(Item(f"# Rename {name} to {name}_all.\n{piece}\n# The renamed code:\n", edited))
    return found


def json_records(count: int, rng: np.random.Generator, records: int = 12) -> list[Item]:
    """Return lists of records with the same keys and drawn values."""
    words = sorted(set(re.findall(r"\b[a-z]{4,9}\b", " ".join(held_out_code()))))

    def record(index: int) -> dict[str, Any]:
        first, second = (words[int(rng.integers(len(words)))] for _ in range(2))
        return {
            "id": index,
            "name": first,
            "tags": [second],
            "active": bool(rng.integers(2)),
            "size": int(rng.integers(999)),
        }

    found = []
    for _ in range(count):
        text = json.dumps([record(index) for index in range(records)], indent=1)
        found.append(Item(f"The {records} records as JSON:\n", text))
    return found


def quoting_summary(prompt: str, sentences: int = 4) -> Item:
    """Return a summary that quotes: the longest of the article's first sentences, in order."""
    article = prompt.partition(":")[2].strip()[:1500]
    parts = re.split(r"(?<=[.!?]) +", article)[:12]
    chosen = sorted(sorted(range(len(parts)), key=lambda index: -len(parts[index]))[:sentences])
    quoted = " ".join(f'It says: "{parts[index]}"' for index in chosen)
    return Item(f"Summarize with quotes: {article}\nSummary: ", quoted)


def second_turn(question: dict[str, Any]) -> Item:
    """Return a chat's second turn, which resends the first with its answer."""
    (first, second), answers = question["turns"][:2], question["reference"]
    return Item(f"User: {first}\nAssistant: {_text(answers[0])}\nUser: {second}\nAssistant: ", _text(answers[-1]))


def encoded(
    item: Item, encode: Callable[[str], list[int]], most_prompt: int, most_new: int
) -> tuple[list[int], list[int]]:
    """Return the token ids of prompt and reference, cut at the prompt's beginning and the reference's end."""
    return encode(item.prompt)[-most_prompt:], encode(item.reference)[:most_new] if item.reference else []


def _answered(question: dict[str, Any]) -> Item:
    return Item(f"{question['turns'][0]}\nAnswer: ", _text(question["reference"]))


def _text(reference: Any) -> str:
    """Return the first text of a reference, which may be lists of alternatives."""
    while not isinstance(reference, str):
        reference = reference[0]
    return reference


def _lines(path: Path) -> list[dict[str, Any]]:
    with gzip.open(path, "rt", encoding="utf-8") as file:
        return [json.loads(line) for line in file]
