"""The training text of the demo pair: the Python standard library's source and GSM8K, split by hash.

Knows files and text, nothing of tokens or models. Only text whose licence lets us ship weights trained on it is
read here: the running interpreter's standard library (PSF-2.0) and GSM8K's training questions (MIT).
"""

import ast
import dataclasses
import gzip
import json
import random
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path

from adaserve_jax.models.held_out import is_held_out, is_test, library_files

EOS, USER, ASSISTANT = "<|endoftext|>", "<|user|>", "<|assistant|>"
MIX = {"lib": 0.52, "test": 0.12, "maths": 0.14, "maths_chat": 0.16, "code_chat": 0.06}
"""Shares of the kinds of documents in what is trained on."""
SYSTEM_TURNS = ("You are a helpful assistant.", "Answer step by step.", "You solve school maths problems.")


@dataclasses.dataclass(frozen=True)
class Document:
    """One text of the corpus. kind: lib, test, maths, maths_chat or code_chat; held_out: never trained on."""

    kind: str
    text: str
    held_out: bool


def documents(gsm8k: Path) -> list[Document]:
    """Return every document, in a fixed order. gsm8k: path of train.jsonl.gz."""
    return [*stdlib_documents(), *gsm8k_documents(gsm8k)]


def stdlib_documents() -> Iterator[Document]:
    """Yield each standard library file, and its documented functions as chat turns, under the file's split."""
    for parts, text in library_files():
        held_out = is_held_out("/".join(parts))
        yield Document("test" if is_test(parts) else "lib", text, held_out)
        if not is_test(parts):
            yield from (Document("code_chat", turn, held_out) for turn in function_turns(text))


def function_turns(source: str) -> Iterator[str]:
    """Yield a chat turn for each short documented function: the docstring's first sentence asks, the source answers."""
    try:
        tree = ast.parse(source)
    except SyntaxError:
        return
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef) or not (doc := ast.get_docstring(node)):
            continue
        wish = " ".join(doc.split("\n\n")[0].split()).rstrip(".")
        code = textwrap.dedent(ast.get_source_segment(source, node, padded=True) or "")
        if 10 < len(wish) < 200 and 60 < len(code) < 1500:
            yield chat(f"Write a Python function {node.name}: {wish}.", f"```python\n{code}\n```")


def gsm8k_documents(path: Path) -> Iterator[Document]:
    """Yield each GSM8K question twice, as plain text and as a chat turn, without the calculator annotations."""
    chooser = random.Random(0)
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        for line in lines:
            row = json.loads(line)
            question, answer = row["question"].strip(), re.sub(r"<<[^>]*>>", "", row["answer"]).strip()
            held_out = is_held_out(question)
            yield Document("maths", f"Question: {question}\nAnswer: {answer}", held_out)
            system = chooser.choice(SYSTEM_TURNS) if chooser.random() < 0.15 else None
            yield Document("maths_chat", chat(question, answer, system), held_out)


def chat(user: str, assistant: str, system: str | None = None) -> str:
    """Return one exchange as the chat template renders it, without the final end-of-text token."""
    return (f"{USER}{system}" if system else "") + f"{USER}{user}{ASSISTANT}{assistant}"
