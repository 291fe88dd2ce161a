"""Public traces of times and lengths: no text, no target.

Sources: Azure's LLM inference traces of 2023 and 2024, github.com/Azure/AzurePublicDataset. Mooncake's,
github.com/kvcache-ai/Mooncake, FAST25-release/traces. BurstGPT, github.com/HPMLL/BurstGPT, whose later releases have
more columns, which are not used. Times count from a file's first request, so that a part of a trace is one too.
Requests without a prompt or an answer (in BurstGPT those that failed) are left out, and the workload's notes count
them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import datetime

from adaserve_jax.workloads.items import BLOCK_TOKENS, Lengths, WorkloadItem
from adaserve_jax.workloads.readers.format import DEFAULT_CLASS, Format, Gaps, has_columns, has_keys
from adaserve_jax.workloads.readers.source import Fields, Source

AZURE_COLUMNS = AZURE_TIME, AZURE_PROMPT, AZURE_OUTPUT = "TIMESTAMP", "ContextTokens", "GeneratedTokens"
_AZURE_TIME = re.compile(r"(\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d)(?:\.(\d{1,9}))?(Z|[+-]\d\d:\d\d)?", re.ASCII)
MOONCAKE_FIELDS = ("timestamp", "input_length", "output_length", "hash_ids")
BURSTGPT_COLUMNS = ("Timestamp", "Request tokens", "Response tokens", "Log Type")
BURSTGPT_CLASSES = {"Conversation log": "chat", "API log": "api"}


def _read_azure(source: Source, gaps: Gaps) -> Iterator[WorkloadItem]:
    rows = [(_nanoseconds(row), _lengths(row, AZURE_PROMPT, AZURE_OUTPUT)) for row in source.rows()]
    first = min((at for at, _ in rows), default=0)
    for at, lengths in rows:
        yield from _answered(gaps, (at - first) / 1e9, lengths)


def _nanoseconds(row: Fields) -> int:
    """Return nanoseconds since 1970; a time without an offset is UTC.

    They are an integer, so that the files' seven digits of a second are kept.
    """
    found = _AZURE_TIME.fullmatch(row.string(AZURE_TIME))
    try:
        if found is None:
            raise ValueError
        at = datetime.fromisoformat(found[1] + (found[3] or "Z").replace("Z", "+00:00"))
        return int(at.timestamp()) * 10**9 + int((found[2] or "").ljust(9, "0"))
    except (ValueError, OverflowError) as error:
        expected = "a time as 2023-11-16 18:15:46.6805900 or 2024-05-10 00:00:00.009930+00:00"
        raise row.fail(AZURE_TIME, expected) from error


def _read_burstgpt(source: Source, gaps: Gaps) -> Iterator[WorkloadItem]:
    time, prompt, output, log = BURSTGPT_COLUMNS
    rows = [(row.seconds(time), row) for row in source.rows()]
    first_s = min((at_s for at_s, _ in rows), default=0.0)
    for at_s, row in rows:
        lengths = _lengths(row, prompt, output)
        slo_class = BURSTGPT_CLASSES.get(row.string(log))
        if slo_class is None:
            raise row.fail(log, " or ".join(map(repr, BURSTGPT_CLASSES)))
        yield from _answered(gaps, at_s - first_s, lengths, slo_class)


def _lengths(row: Fields, prompt: str, output: str) -> Lengths:
    return Lengths(row.integer(prompt, low=0), row.integer(output, low=0))


def _answered(gaps: Gaps, at_s: float, lengths: Lengths, slo_class: str = DEFAULT_CLASS) -> Iterator[WorkloadItem]:
    if lengths.prompt_tokens and lengths.output_tokens:
        yield gaps.item(slo_class=slo_class, arrival_s=at_s, lengths=lengths)
    else:
        gaps.left_out["requests without a prompt or an answer"] += 1


def _read_mooncake(source: Source, gaps: Gaps) -> Iterator[WorkloadItem]:
    lines = [(line.seconds("timestamp", per=1e3), line) for line in source.objects()]
    first_s = min((at_s for at_s, _ in lines), default=0.0)
    for at_s, line in lines:
        line.only(MOONCAKE_FIELDS)
        prompt = line.integer("input_length", low=0)
        lengths = Lengths(prompt, line.integer("output_length", low=0), _blocks(line, prompt))
        yield from _answered(gaps, at_s - first_s, lengths)


def _blocks(line: Fields, prompt_tokens: int) -> tuple[int, ...]:
    """Return hash_ids, names of the prompt's blocks: prompts whose first ids are equal begin alike."""
    ids, expected = line.values.get("hash_ids"), -(-prompt_tokens // BLOCK_TOKENS)
    if not isinstance(ids, list) or len(ids) != expected or not all(map(_is_id, ids)):
        raise line.fail("hash_ids", f"{expected} whole numbers, one for every {BLOCK_TOKENS} tokens of the prompt")
    return tuple(ids)


def _is_id(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63


FORMATS = (
    Format("azure", has_columns(*AZURE_COLUMNS), _read_azure),
    Format("mooncake", has_keys("timestamp", "input_length", "output_length"), _read_mooncake),
    Format("burstgpt", has_columns(*BURSTGPT_COLUMNS), _read_burstgpt),
)
