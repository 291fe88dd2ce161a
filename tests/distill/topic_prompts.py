"""Real text of three topics: code and prose of Python's own library, and maths questions as schoolbooks have them."""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
import random
import textwrap

MODULES = (
    "argparse", "csv", "difflib", "fractions", "heapq", "inspect", "optparse", "shlex", "statistics", "string",
    "tarfile", "textwrap", "threading",
)  # fmt: skip
QUESTIONS = (
    "{name} has {a} {thing} and buys {b} more every week. How many {thing} does {name} have after {c} weeks?",
    "A shop sells {thing} for ${a} each. {name} buys {b} and pays with a ${c}00 bill. How much change is due?",
    "{name} shares {a} {thing} equally among {b} friends and keeps {c} for later. How many does each friend get?",
    "In a class of {a} students, {b} percent like {thing}. {name} asks {c}. How many of the others like {thing}?",
    "{name} walks {a} miles in {b} hours to fetch {thing}. At that speed, how far does {name} get in {c} hours?",
)
NAMES, THINGS = ("Natalia", "Tom", "Betty", "Weng", "Julie"), ("apples", "books", "marbles", "pencils", "cookies")


@functools.cache
def _nodes() -> list[tuple[list[str], ast.AST]]:
    """Every node of the modules, with the lines of its module."""
    sources = [inspect.getsource(importlib.import_module(name)) for name in MODULES]
    return [(lines, node) for text in sources for lines in [text.splitlines()] for node in ast.walk(ast.parse(text))]


def code() -> list[str]:
    """The beginnings of functions, docstrings left out."""
    found = []
    for lines, node in _nodes():
        if isinstance(node, ast.FunctionDef) and ast.get_docstring(node) is None and node.end_lineno is not None:
            body = lines[node.lineno - 1 : min(node.end_lineno, node.lineno + 11)]
            if len(body) >= 4:
                found.append(textwrap.dedent("\n".join(body)))
    return found


def prose() -> list[str]:
    """Paragraphs of docstrings, in which there is no example."""
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef)
    texts = [ast.get_docstring(node) or "" for _, node in _nodes() if isinstance(node, kinds)]
    paragraphs = [paragraph for text in texts for paragraph in text.split("\n\n")]
    return [part for part in paragraphs if len(part) > 120 and ">>>" not in part and "  " not in part]


def maths(number: int = 200) -> list[str]:
    rng = random.Random(0)
    values = [{part: rng.randint(2, 90) for part in "abc"} for _ in range(number)]
    return [
        QUESTIONS[index % len(QUESTIONS)].format(name=rng.choice(NAMES), thing=rng.choice(THINGS), **each)
        for index, each in enumerate(values)
    ]
