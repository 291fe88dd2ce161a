"""Mooncake's traces: times, lengths and which prompts begin alike, no text, no target.

JSON lines of timestamp (milliseconds), input_length, output_length and hash_ids.
hash_ids name the prompt's blocks of 512 tokens: requests whose first ids are equal have prompts that begin alike, and
so do the texts made for them. Source: github.com/kvcache-ai/Mooncake, FAST25-release/traces.
"""

from __future__ import annotations

from collections.abc import Iterator

from adaserve_jax.workloads.items import BLOCK_TOKENS, Lengths, WorkloadItem
from adaserve_jax.workloads.readers.format import Format, Gaps, has_keys
from adaserve_jax.workloads.readers.source import Fields, Source

FIELDS = ("timestamp", "input_length", "output_length", "hash_ids")


def read(source: Source, gaps: Gaps) -> Iterator[WorkloadItem]:
    for line in source.objects():
        line.only(FIELDS)
        prompt = line.integer("input_length")
        lengths = Lengths(prompt, line.integer("output_length"), _blocks(line, prompt))
        yield gaps.item(arrival_s=line.seconds("timestamp", per=1e3), lengths=lengths)


def _blocks(line: Fields, prompt_tokens: int) -> tuple[int, ...]:
    ids, expected = line.values.get("hash_ids"), -(-prompt_tokens // BLOCK_TOKENS)
    if not isinstance(ids, list) or len(ids) != expected or not all(map(_is_id, ids)):
        raise line.fail("hash_ids", f"{expected} whole numbers, one for every {BLOCK_TOKENS} tokens of the prompt")
    return tuple(ids)


def _is_id(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63


FORMAT = Format("mooncake", has_keys("timestamp", "input_length", "output_length"), read)
