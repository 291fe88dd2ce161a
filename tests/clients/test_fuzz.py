"""Thousands of bodies, right ones and such as no client would send: none is answered with a 5xx, none takes more than
two seconds."""

from __future__ import annotations

import copy
import json
import random
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

pytestmark = [pytest.mark.clients, pytest.mark.timeout(1800)]
CASES, THREADS, LONGEST_S = 5000, 4, 2.0
CHAT = {"model": "demo", "messages": [{"role": "user", "content": "Tom has 3 apples."}], "max_completion_tokens": 4}
TOOL = {"type": "function", "function": {"name": "say", "parameters": {"type": "object", "properties": {}}}}
SEEDS: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"prompt": "def add(a, b):", "max_tokens": 4, "temperature": 0.5, "seed": 1, "stop": ["x"]}),
    ("/v1/completions", {"prompt": [[1, 2, 3]], "max_tokens": 4, "logprobs": 2, "echo": True, "n": 1, "top_p": 0.9}),
    ("/v1/completions", {"prompt": "x", "max_tokens": 4, "slo_tpot_ms": 40, "logit_bias": {"5": 1}, "stream": True}),
    ("/v1/completions", {"prompt": "x", "max_tokens": 4, "guided_regex": "[a-c]+", "prompt_logprobs": 1}),
    ("/v1/chat/completions", CHAT | {"tools": [TOOL], "tool_choice": "auto", "parallel_tool_calls": False}),
    ("/v1/chat/completions", CHAT | {"stream": True, "stream_options": {"include_usage": True}, "top_logprobs": 1}),
    ("/v1/chat/completions", CHAT | {"response_format": {"type": "json_object"}, "presence_penalty": 0.5}),
    ("/v1/responses", {"model": "demo", "input": "x", "max_output_tokens": 4, "instructions": "y"}),
    ("/tokenize", {"prompt": "naïve 漢字"}),
    ("/detokenize", {"tokens": [1, 2, 3]}),
]  # fmt: skip
ODD: list[Any] = [
    None, True, 0, -1, 2**63, -(2**63), 10**30, 1e308, 0.5, "", "\0", "\ud800", "x" * 5000, "🙂", [], {}, [[]], [None],
    [1] * 700, {"type": "object"}, {"$ref": "#"}, "(a+)+$", "NaN", float("nan"), float("inf"), [{"role": "user"}],
]  # fmt: skip
NEEDED = ("model", "prompt", "messages", "input", "tokens", "max_tokens", "max_completion_tokens", "max_output_tokens")
LENGTHS = ("max_tokens", "max_completion_tokens", "max_output_tokens", "n", "best_of")
"""What these allow takes long by right; they are changed to values that are refused or small."""


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return the paths of what is inside a JSON value, a few levels deep."""
    if len(path) == 6:
        return []
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [found for key, each in inner for found in [(*path, key), *places(each, (*path, key))]]


def mutated(body: dict[str, Any], rng: random.Random) -> bytes:
    """Change, drop, nest or rename one to three parts of a body, or the bytes of its JSON."""
    body = copy.deepcopy(body)
    for _ in range(rng.randint(1, 3)):
        paths = [path for path in places(body) if path[-1] not in LENGTHS]
        *way, last = rng.choice(paths)
        parent: Any = body
        for key in way:
            parent = parent[key]
        kind = rng.randrange(5)
        if kind <= 1:
            parent[last] = copy.deepcopy(rng.choice(ODD))
        elif kind == 2:
            parent[last] = [parent[last]] * rng.choice((1, 2, 50))
        elif kind == 3 and isinstance(parent, dict):
            parent[f"{last}{rng.choice(('_', 'x', ' '))}"] = parent.pop(last)
        elif kind == 4:
            for _ in range(rng.choice((1, 30, 200))):
                parent[last] = {"a": parent[last]} if rng.random() < 0.5 else [parent[last]]
        if not places(body):
            break
    body |= {name: rng.choice(ODD[2:9]) for name in LENGTHS if name in body and rng.random() < 0.05}
    content = bytearray(json.dumps(body).encode())
    if rng.random() < 0.25:
        for _ in range(rng.randint(1, 4)):
            content[rng.randrange(len(content))] = rng.randrange(256)
    if rng.random() < 0.05:
        del content[rng.randrange(len(content)) :]
    return bytes(content)


def varied(body: dict[str, Any], rng: random.Random) -> bytes:
    """Change a body as clients do, so that it stays right: other texts and numbers, fewer optional fields."""
    body = {name: value for name, value in body.items() if name in NEEDED or rng.random() < 0.7}
    for name in {"prompt", "input"} & body.keys():
        if isinstance(body[name], str):
            body[name] = "".join(rng.choices('ab\n"{<漢🙂\0 ', k=rng.randint(1, 200)))
    if "max_tokens" in body:
        body |= {"temperature": rng.uniform(0, 2), "seed": rng.randrange(2**40), "top_k": rng.randrange(50)}
    return json.dumps(body).encode()


def test_no_body_brings_a_server_error_or_takes_long(demo_url):
    statuses: dict[int, int] = {}
    wrong: list[tuple[Any, ...]] = []
    with httpx.Client(base_url=demo_url, timeout=60) as http, ThreadPoolExecutor(THREADS) as pool:

        def tried(number: int) -> tuple[int, int, float]:
            path, content = case(number)
            began_s = time.monotonic()
            answer = http.post(path, content=content, headers={"content-type": "application/json"})
            return number, answer.status_code, time.monotonic() - began_s

        for number, status, took_s in pool.map(tried, range(CASES)):
            statuses[status] = statuses.get(status, 0) + 1
            if status >= 500 or took_s > LONGEST_S:
                wrong.append((number, status, took_s, *case(number)))
        print(f"{CASES} cases: {dict(sorted(statuses.items()))}")
        assert wrong == []
        assert sum(statuses.values()) == CASES and statuses[200] > CASES / 4 and statuses[400] > CASES / 4
        assert http.get("/ready").status_code == 200


def case(number: int) -> tuple[str, bytes]:
    """Return the path and body of a case, which depend on its number alone."""
    rng = random.Random(number)
    path, body = rng.choice(SEEDS)
    return path, (varied if number % 3 == 0 else mutated)(body, rng)
