"""This package's own workloads: JSON lines, one request each, with its SLO class and targets."""

from __future__ import annotations

from collections.abc import Iterator

from adaserve_jax.errors import ConfigError
from adaserve_jax.sampling import MAX_SEED
from adaserve_jax.workloads.items import WorkloadItem
from adaserve_jax.workloads.readers.format import DEFAULT_CLASS, Format, Gaps
from adaserve_jax.workloads.readers.source import MOST_SECONDS, Source

FIELDS = (
    "prompt", "messages", "max_tokens", "slo_class", "slo_tpot_ms", "slo_relative", "slo_ttft_ms", "slo_e2e_ms",
    "temperature", "seed", "arrival_s",
)  # fmt: skip
MAX_TOKENS = 64
"""Output tokens of a line that does not say."""
MOST_OUTPUT = 2**31 - 1
MAX_TEMPERATURE = 100.0


def read(source: Source, gaps: Gaps) -> Iterator[WorkloadItem]:
    for line in source.objects():
        line.only(FIELDS)
        prompt, messages = line.text("prompt", required=False), line.messages()
        if (prompt is None) == (messages == ()):
            raise ConfigError(f"{line.where}: prompt: expected exactly one of prompt and messages")
        yield gaps.item(
            prompt=prompt,
            messages=messages,
            max_tokens=line.integer("max_tokens", high=MOST_OUTPUT, default=gaps.max_tokens or MAX_TOKENS),
            slo_class=line.text("slo_class", required=False) or DEFAULT_CLASS,
            slo=line.slo(),
            temperature=line.optional("temperature", low=0.0, high=MAX_TEMPERATURE),
            seed=line.integer("seed", low=0, high=MAX_SEED) if line.has("seed") else None,
            arrival_s=line.optional("arrival_s", low=0.0, high=MOST_SECONDS),
        )


FORMAT = Format(
    "jsonl", lambda source, keys: source.is_json and bool(keys & {"prompt", "messages"}), read, only_alone=True
)
