"""Prompts of four kinds of traffic that the embedded target speaks: some to be served, others to be judged by.

    python -m benchmarks.osd.prompts code --count 256 --out code.jsonl      # for adaserve distill

Code is cut from files of the standard library that the embedded pair never saw; some files are for judging alone.
Knows files, nothing of models.
"""

from __future__ import annotations

import ast
import gzip
import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from adaserve_jax.errors import ConfigError
from adaserve_jax.models.held_out import is_held_out, is_test, library_files

USER, ASSISTANT = "<|user|>", "<|assistant|>"
JUDGED_FILES = 4
"""Files of each kind of code that are cut for judging only."""
MIN_LINES, MAX_LINES = 3, 12
"""Of a prompt that is cut from a file."""
MIN_CHARS, MAX_CHARS = 80, 400


@dataclass(frozen=True)
class Domain:
    """One kind of traffic. served: what clients ask; judged: what acceptance is measured on, never served."""

    name: str
    served: list[str]
    judged: list[str]


def domains(names: tuple[str, ...], gsm8k: Path | None, served: int, judged: int) -> list[Domain]:
    """Return so many prompts of each kind, always the same. gsm8k: train.jsonl.gz, for maths. Raises ConfigError."""
    return [_BUILD[name](gsm8k, served, judged, random.Random(f"0/{name}")) for name in names]


def _code(_: Path | None, served: int, judged: int, rng: random.Random) -> Domain:
    return _cut("code", _held_out_files(tests=False), served, judged, rng)


def _tests(_: Path | None, served: int, judged: int, rng: random.Random) -> Domain:
    return _cut("tests", _held_out_files(tests=True), served, judged, rng)


def _maths(gsm8k: Path | None, served: int, judged: int, rng: random.Random) -> Domain:
    def shown(question: str) -> str:
        return f"Question: {question}\nAnswer:"

    return _questions("maths", _gsm8k(gsm8k), shown, served, judged, rng)


def _requests(_: Path | None, served: int, judged: int, rng: random.Random) -> Domain:
    def shown(wish: str) -> str:
        return f"{USER}{wish}{ASSISTANT}"

    return _questions("requests", sorted(set(_wishes())), shown, served, judged, rng)


_BUILD: dict[str, Callable[[Path | None, int, int, random.Random], Domain]] = {
    "code": _code, "maths": _maths, "requests": _requests, "tests": _tests
}  # fmt: skip
NAMES = tuple(_BUILD)


def _held_out_files(*, tests: bool) -> list[str]:
    return [text for parts, text in library_files() if is_held_out("/".join(parts)) and is_test(parts) == tests]


def _cut(name: str, texts: list[str], served: int, judged: int, rng: random.Random) -> Domain:
    rng.shuffle(texts)
    parts = texts[JUDGED_FILES:], texts[:JUDGED_FILES]
    cuts = [_cuts(part, count, rng) for part, count in zip(parts, (served, judged), strict=True)]
    return Domain(name, *cuts)


def _cuts(texts: list[str], count: int, rng: random.Random) -> list[str]:
    """Cut prompts from places drawn evenly over all lines."""
    if not texts:
        raise ConfigError("this Python has no source files of its library, of which prompts are cut")
    lines = [text.splitlines(keepends=True) for text in texts]
    weights = [len(each) for each in lines]
    found: list[str] = []
    while len(found) < count:
        (each,) = rng.choices(lines, weights)
        start = rng.randrange(len(each))
        cut = "".join(each[start : start + rng.randint(MIN_LINES, MAX_LINES)])[:MAX_CHARS]
        if len(cut.strip()) >= MIN_CHARS:
            found.append(cut)
    return found


def _questions(
    name: str, all_of_them: list[str], shown: Callable[[str], str], served: int, judged: int, rng: random.Random
) -> Domain:
    """Judged are those that the embedded pair never saw; served are others, again from the first when they run out."""
    kept = [question for question in all_of_them if is_held_out(question)]
    others = [question for question in all_of_them if not is_held_out(question)]
    rng.shuffle(kept)
    rng.shuffle(others)
    return Domain(
        name,
        [shown(others[index % len(others)]) for index in range(served)],
        [shown(question) for question in kept[:judged]],
    )


def _gsm8k(path: Path | None) -> list[str]:
    if path is None:
        raise ConfigError("maths prompts are GSM8K's: give --gsm8k, the path of its train.jsonl.gz")
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        return [json.loads(line)["question"].strip() for line in lines]


def _wishes() -> Iterator[str]:
    """Yield requests for the library's documented functions."""
    for parts, text in library_files():
        if is_test(parts):
            continue
        try:
            tree = ast.parse(text)
        except SyntaxError:
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef) and (doc := ast.get_docstring(node)):
                wish = " ".join(doc.split("\n\n")[0].split()).rstrip(".")
                if 10 < len(wish) < 200:
                    yield f"Write a Python function {node.name}: {wish}."


def write(
    kind: Annotated[str, typer.Argument(help=f"one of {', '.join(NAMES)}")],
    count: Annotated[int, typer.Option(help="prompts")],
    out: Annotated[Path, typer.Option(help="file to write, one JSON object with a prompt on each line")],
    gsm8k: Annotated[Path | None, typer.Option(help="GSM8K's train.jsonl.gz, for maths prompts")] = None,
) -> None:
    """Write prompts of the kind that are served: what a draft may be distilled from beforehand."""
    if kind not in NAMES:
        raise typer.BadParameter(f"expected one of {', '.join(NAMES)}, got {kind!r}", param_hint="kind")
    write_prompts(out, domains((kind,), gsm8k, count, 0)[0].served)


def write_prompts(path: Path, prompts: list[str]) -> None:
    """Write prompts as `adaserve distill` reads them."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))


if __name__ == "__main__":
    typer.run(write)
