"""BurstGPT's traces: times and lengths, no text, no target.

Tables of Timestamp (seconds), Model, Request tokens, Response tokens and Log Type.
Later releases have more columns (Session ID, Elapsed time), which are not used. Requests that failed have 0 response
tokens; they are left out, and the workload's notes count them. Conversations are class chat, calls of the
API class api.
Source: github.com/HPMLL/BurstGPT.
"""

from __future__ import annotations

from collections.abc import Iterator

from adaserve_jax.workloads.items import Lengths, WorkloadItem
from adaserve_jax.workloads.readers.format import EMPTY, Format, Gaps, has_columns
from adaserve_jax.workloads.readers.source import Source

TIME, REQUEST, RESPONSE, LOG = "Timestamp", "Request tokens", "Response tokens", "Log Type"
CLASSES = {"Conversation log": "chat", "API log": "api"}


def read(source: Source, gaps: Gaps) -> Iterator[WorkloadItem]:
    for row in source.rows():
        at_s = row.seconds(TIME)
        prompt, output = row.integer(REQUEST, low=0), row.integer(RESPONSE, low=0)
        slo_class = CLASSES.get(row.string(LOG))
        if slo_class is None:
            raise row.fail(LOG, " or ".join(map(repr, CLASSES)))
        if prompt and output:
            yield gaps.item(slo_class=slo_class, arrival_s=at_s, lengths=Lengths(prompt, output))
        else:
            gaps.left_out[EMPTY] += 1


FORMAT = Format("burstgpt", has_columns(TIME, REQUEST, RESPONSE, LOG), read)
