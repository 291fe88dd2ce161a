"""Requests of every class of a server at once, each with its own speed target; prints how many met theirs.

Start a server (`make serve`), then:

    python examples/mixed_slo_client.py --base-url http://127.0.0.1:8000/v1 --requests 8

Needs `pip install openai rich`. The classes are those that the server tells of its model.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import time
from dataclasses import dataclass
from statistics import mean

import openai
from rich.console import Console
from rich.table import Table

PROMPTS = ("Complete the function:\ndef add(a, b):", "Tom has 3 apples.", "Once upon a")
CAPTION = '"Here" can be too low: this program reads events that waited all at once.'


@dataclass(frozen=True)
class Served:
    """One request that was answered.

    tpot_ms: from the first event with tokens to the last, per token after those of the first event, by this client's
    clock; None where one event brought all. slo: what the server says.
    """

    slo_class: str
    tpot_ms: float | None
    slo: dict


async def ask(client: openai.AsyncOpenAI, model: str, slo_class: str, prompt: str, max_tokens: int) -> Served:
    """Stream one completion and time its tokens."""
    stream = await client.completions.create(
        model=model, prompt=prompt, max_tokens=max_tokens, stream=True,
        stream_options={"include_usage": True, "continuous_usage_stats": True},
        extra_body={"slo_class": slo_class, "ignore_eos": True},
    )  # fmt: skip
    seen: list[tuple[float, int]] = []  # an event may bring several tokens: its usage counts those so far
    async for event in stream:
        if event.choices:
            seen.append((time.perf_counter(), event.usage.completion_tokens))
    (first_s, first_tokens), (last_s, last_tokens) = seen[0], seen[-1]
    later = last_tokens - first_tokens
    tpot_ms = (last_s - first_s) / later * 1e3 if later else None
    return Served(slo_class, tpot_ms, event.metrics["slo"])  # the last event has the metrics


def mean_of(values: list[float | None]) -> str:
    known = [value for value in values if value is not None]
    return f"{mean(known):.1f}" if known else "-"


def table_of(served: list[Served]) -> Table:
    table = Table(title="Speed targets (TPOT: milliseconds per output token)", caption=CAPTION)
    for name in ("class", "requests", "target ms", "TPOT ms, server", "TPOT ms, here", "met"):
        table.add_column(name, justify="left" if name == "class" else "right")
    for slo_class in dict.fromkeys(one.slo_class for one in served):
        mine = [one for one in served if one.slo_class == slo_class]
        target = mine[0].slo["tpot_target_ms"]
        here, there = mean_of([one.tpot_ms for one in mine]), mean_of([one.slo["tpot_ms"] for one in mine])
        met = "-" if target is None else f"{mean(bool(one.slo['met']) for one in mine):.0%}"
        shown = "none" if target is None else f"{target:g}"
        table.add_row(slo_class, str(len(mine)), shown, there, here, met)
    return table


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--base-url", default="http://127.0.0.1:8000/v1")
    parser.add_argument("--api-key", default=os.environ.get("ADASERVE_API_KEY", "none"))
    parser.add_argument("--requests", type=int, default=8, help="of each class")
    parser.add_argument("--max-tokens", type=int, default=64)
    args = parser.parse_args()
    async with openai.AsyncOpenAI(base_url=args.base_url, api_key=args.api_key) as client:
        model = (await client.models.list()).data[0]
        classes = zip(model.slo_classes, itertools.cycle(PROMPTS))
        each = [(name, prompt) for name, prompt in classes for _ in range(args.requests)]
        await ask(client, model.id, *each[0], 2)  # the first answer keeps the package busy while others would wait
        asked = [ask(client, model.id, name, prompt, args.max_tokens) for name, prompt in each]
        Console().print(table_of(await asyncio.gather(*asked)))


if __name__ == "__main__":
    asyncio.run(main())
