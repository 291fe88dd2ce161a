"""The interface of a reader of one format, and the defaults for what a format does not say."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from adaserve_jax.types import SLO
from adaserve_jax.workloads.items import Lengths, Message, WorkloadItem
from adaserve_jax.workloads.readers.source import Source

MAX_TOKENS = 256
"""Output tokens of a request that does not say: AdaServe's."""
TEMPERATURE = 1.0
"""Temperature of a request that does not say: OpenAI's default."""
DEFAULT_CLASS = "default"


@dataclass(frozen=True)
class Gaps:
    """Defaults that fill the gaps of a format; None: the format's own default. texts: False where lengths alone are
    wanted: prompts of requests that have lengths are left out. Reading adds left_out, how often something in the file
    is not replayed, by its name, and also_read, hashes of the other files."""

    max_tokens: int | None = None
    temperature: float | None = None
    slo_class: str | None = None
    texts: bool = True
    left_out: Counter[str] = field(default_factory=Counter)
    also_read: list[str] = field(default_factory=list)

    def item(
        self, *, prompt: str | None = None, messages: tuple[Message, ...] = (), slo_class: str = DEFAULT_CLASS,
        slo: SLO | None = None, max_tokens: int | None = None, temperature: float | None = None,
        seed: int | None = None, arrival_s: float | None = None, lengths: Lengths | None = None,
    ) -> WorkloadItem:  # fmt: skip
        """Return a request with its gaps filled. slo_class: the format's own name for it."""
        if max_tokens is None:
            max_tokens = lengths.output_tokens if lengths is not None else self.max_tokens or MAX_TOKENS
        if temperature is None:
            temperature = TEMPERATURE if self.temperature is None else self.temperature
        return WorkloadItem(
            prompt, messages, max_tokens, self.slo_class or slo_class, SLO() if slo is None else slo, temperature, seed,
            arrival_s, lengths,
        )  # fmt: skip


@dataclass(frozen=True)
class Format:
    """detects: whether a file looks like one, from its first request alone (`keys`: the JSON object's keys, or the
    table's columns). read: every request in the file's order; raises ConfigError naming file, line and field.
    only_alone: whether it gives way to any other format that detects the file too.
    """

    name: str
    detects: Callable[[Source, frozenset[str]], bool]
    read: Callable[[Source, Gaps], Iterator[WorkloadItem]]
    only_alone: bool = False


def has_keys(*names: str, without: tuple[str, ...] = ()) -> Callable[[Source, frozenset[str]], bool]:
    """Return a detector of JSON objects that have all of `names` and none of `without`."""
    return lambda source, keys: source.is_json and keys.issuperset(names) and keys.isdisjoint(without)


def has_columns(*names: str) -> Callable[[Source, frozenset[str]], bool]:
    """Return a detector of tables that have all of these columns."""
    return lambda source, keys: not source.is_json and keys.issuperset(names)
