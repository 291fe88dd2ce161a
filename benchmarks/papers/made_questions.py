"""Maths questions from templates, in the format of GSM8K's files: what {gsm8k} stands for without it."""

from __future__ import annotations

import gzip
import json
import random
from pathlib import Path

COUNT = 4000
NAMES = ("Ava", "Ben", "Chloe", "Daniel", "Emma", "Farid", "Grace", "Hugo", "Ines", "Jamal", "Keiko", "Liam")
THINGS = ("apples", "books", "cards", "eggs", "flowers", "marbles", "pencils", "shells", "stamps", "tickets")
DAYS = ("day", "week", "month")


def write_questions(path: Path, seed: int = 0) -> None:
    """COUNT different questions, one a line, as .gz; the same for the same seed."""
    rng = random.Random(seed)
    found: dict[str, int] = {}
    while len(found) < COUNT:
        question, answer = rng.choice((_bought, _shared, _saved))(rng)
        found[question] = answer
    lines = (json.dumps({"question": q, "answer": f"#### {answer}"}) + "\n" for q, answer in found.items())
    path.write_bytes(gzip.compress("".join(lines).encode(), mtime=0))


def _bought(rng: random.Random) -> tuple[str, int]:
    name, thing = rng.choice(NAMES), rng.choice(THINGS)
    count, price, paid = rng.randint(2, 20), rng.randint(2, 9), 200
    return (
        f"{name} buys {count} {thing} for ${price} each and pays with ${paid}. How much money does {name} get back?",
        paid - count * price,
    )


def _shared(rng: random.Random) -> tuple[str, int]:
    (name, other), thing = rng.sample(NAMES, 2), rng.choice(THINGS)
    each, friends, kept = rng.randint(2, 12), rng.randint(2, 9), rng.randint(1, 30)
    return (
        f"{name} has {each * friends + kept} {thing}. {name} gives {each} of them to each of {friends} friends, one of "
        f"whom is {other}. How many {thing} does {name} have left?",
        kept,
    )


def _saved(rng: random.Random) -> tuple[str, int]:
    name, day = rng.choice(NAMES), rng.choice(DAYS)
    first, more, times = rng.randint(5, 60), rng.randint(2, 15), rng.randint(3, 12)
    return (
        f"{name} has ${first} and saves ${more} every {day}. How many dollars does {name} have after {times} {day}s?",
        first + more * times,
    )
