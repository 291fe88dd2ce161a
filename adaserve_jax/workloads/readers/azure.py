"""Azure's LLM inference traces of 2023 and 2024: times and lengths, no text, no target.

Tables of TIMESTAMP, ContextTokens and GeneratedTokens.
The years differ in how they write times: 2023-11-16 18:15:46.6805900 and 2024-05-10 00:00:00.009930+00:00. Times count
from the earliest. Requests without a prompt or an answer are left out, and the workload's notes count them.
Source: github.com/Azure/AzurePublicDataset.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import datetime

from adaserve_jax.workloads.items import Lengths, WorkloadItem
from adaserve_jax.workloads.readers.format import EMPTY, Format, Gaps, has_columns
from adaserve_jax.workloads.readers.source import Fields, Source

TIME, CONTEXT, GENERATED = "TIMESTAMP", "ContextTokens", "GeneratedTokens"
_TIME = re.compile(r"(\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d)(?:\.(\d{1,9}))?(Z|[+-]\d\d:\d\d)?", re.ASCII)


def read(source: Source, gaps: Gaps) -> Iterator[WorkloadItem]:
    rows = [(_nanoseconds(row), row.integer(CONTEXT, low=0), row.integer(GENERATED, low=0)) for row in source.rows()]
    first = min((at for at, _, _ in rows), default=0)
    for at, prompt, output in rows:
        if prompt and output:
            yield gaps.item(arrival_s=(at - first) / 1e9, lengths=Lengths(prompt, output))
        else:
            gaps.left_out[EMPTY] += 1


def _nanoseconds(row: Fields) -> int:
    """Since 1970; a time without an offset is UTC. Whole, so that the files' seven digits of a second are kept."""
    found = _TIME.fullmatch(row.string(TIME))
    try:
        if found is None:
            raise ValueError
        at = datetime.fromisoformat(found[1] + (found[3] or "Z").replace("Z", "+00:00"))
        return int(at.timestamp()) * 10**9 + int((found[2] or "").ljust(9, "0"))
    except (ValueError, OverflowError) as error:
        raise row.fail(TIME, "a time as 2023-11-16 18:15:46.6805900 or 2024-05-10 00:00:00.009930+00:00") from error


FORMAT = Format("azure", has_columns(TIME, CONTEXT, GENERATED), read)
