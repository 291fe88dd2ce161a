"""OpenAI's batch files: JSON lines of custom_id, method, url and body, of chats and of completions.

A body may carry this server's targets (slo_tpot_ms, slo_ttft_ms, slo_e2e_ms, slo_relative, slo_class). Of sampling,
max_tokens (or max_completion_tokens), temperature and seed are replayed; what else a body asks for is left out, and the
workload's notes count it. Source: platform.openai.com/docs/guides/batch.
"""

from __future__ import annotations

from collections.abc import Iterator

from adaserve_jax.sampling import MAX_SEED
from adaserve_jax.workloads.items import Message, WorkloadItem
from adaserve_jax.workloads.readers.format import DEFAULT_CLASS, Format, Gaps, has_keys
from adaserve_jax.workloads.readers.jsonl import MAX_TEMPERATURE, MOST_OUTPUT
from adaserve_jax.workloads.readers.source import Fields, Source

FIELDS = ("custom_id", "method", "url", "body")
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
READ = {
    "prompt", "messages", "max_tokens", "max_completion_tokens", "temperature", "seed",
    "slo_tpot_ms", "slo_ttft_ms", "slo_e2e_ms", "slo_relative", "slo_class",
}  # fmt: skip
WITHOUT_EFFECT = {"model", "stream", "stream_options", "user", "metadata", "store", "service_tier", "safety_identifier"}
"""Fields of a body that say nothing of what is generated."""


def read(source: Source, gaps: Gaps) -> Iterator[WorkloadItem]:
    seen: set[str] = set()
    for line in source.objects():
        line.only(FIELDS)
        custom_id = line.string("custom_id")
        if custom_id in seen:
            raise line.fail("custom_id", "one that no line before has")
        seen.add(custom_id)
        if line.values.get("method") != "POST":
            raise line.fail("method", "'POST'")
        if line.values.get("url") not in (CHAT, COMPLETIONS):
            raise line.fail("url", f"{CHAT!r} or {COMPLETIONS!r}")
        if not isinstance(line.values.get("body"), dict):
            raise line.fail("body", "a JSON object")
        yield _item(Fields(line.values["body"], f"{line.where}: body"), line.values["url"] == CHAT, gaps)


def _item(body: Fields, is_chat: bool, gaps: Gaps) -> WorkloadItem:
    for name in body.values.keys() - READ - WITHOUT_EFFECT:
        if body.has(name):
            gaps.left_out[f"{name!r:.60} in the bodies of requests"] += 1
    messages: tuple[Message, ...] = body.messages() if is_chat else ()
    if is_chat and not messages:
        raise body.fail("messages", 'a non-empty list of {"role": text, "content": text}')
    most = next((name for name in ("max_completion_tokens", "max_tokens") if body.has(name)), None)
    return gaps.item(
        prompt=None if is_chat else body.string("prompt"),
        messages=messages,
        max_tokens=None if most is None else body.integer(most, high=MOST_OUTPUT),
        slo_class=body.text("slo_class", required=False) or DEFAULT_CLASS,
        slo=body.slo(),
        temperature=body.optional("temperature", low=0.0, high=MAX_TEMPERATURE),
        seed=body.integer("seed", low=0, high=MAX_SEED) if body.has("seed") else None,
    )


FORMAT = Format("openai-batch", has_keys("custom_id", "body"), read)
