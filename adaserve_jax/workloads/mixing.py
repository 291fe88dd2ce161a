"""Makes workloads from a workload: another share of urgent requests, other targets, shorter requests, chats.

Each says by its name and hash what was done. Knows nothing of arrivals, engines or policies.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from adaserve_jax.errors import ConfigError
from adaserve_jax.workloads.items import Lengths, Message, Workload, WorkloadItem
from adaserve_jax.workloads.workload import with_relative

MOST_COPIES, SHARE_ERROR = 100, 0.01
"""A workload without times is repeated, at most so often, until a share of its requests can be hit this closely. 60
requests, as the packaged ones, are never repeated: a short run over many copies would be a random draw of them."""


def with_urgent_share(workload: Workload, share: float) -> Workload:
    """Return the workload with `share` of its requests of the urgent class, the others in their proportion.

    That class is the only one with relative targets; without any, that of the least TPOT target. The fewest requests
    are replaced by others of the workload, at the same times; with a greater share, those that were urgent stay so. A
    workload without times is repeated where a whole number of its requests is not close to the share.

    Raises ConfigError: no such share, no one class that is the most urgent, or nothing to replace requests by.
    """
    if not 0 <= share <= 1:
        raise ConfigError(f"urgent share: expected a number from 0 to 1, got {share}")
    name = _urgent_class(workload)
    ours = [item for item in workload.items if item.slo_class == name]
    others = [item for item in workload.items if item.slo_class != name]
    if (share > 0 and not ours) or (share < 1 and not others):
        raise ConfigError(
            f"urgent share: {share:g} of class {name!r} needs requests of that class and of another; workload "
            f"{workload.name} has {', '.join(workload.classes)}"
        )
    copies = 1 if workload.has_arrivals else _copies(len(workload.items), share)
    items = list(workload.items) * copies
    rng = np.random.default_rng(0)
    is_urgent = np.array([item.slo_class == name for item in items])
    order = [*rng.permutation(np.flatnonzero(is_urgent)), *rng.permutation(np.flatnonzero(~is_urgent))]
    count = round(share * len(items))
    for places, bodies in ((order[:count], ours), (order[count:], others)):
        substitutes = _spread(bodies, rng)
        wrong = sorted(int(place) for place in places if is_urgent[place] != (bodies is ours))
        for number, place in enumerate(wrong):
            items[place] = replace(substitutes[number % len(substitutes)], arrival_s=items[place].arrival_s)
    return workload.derived(f"urgent {name}={share:g}", items)


def with_slo_scale(workload: Workload, scale: float) -> Workload:
    """Make relative TPOT targets `scale` baseline latencies; targets in milliseconds stay. AdaServe's figure 11."""
    return workload.derived(f"scale {scale:g}", with_relative(workload.items, scale, f"workload {workload.name}"))


@dataclass(frozen=True)
class LengthLimits:
    """Limits that shorten requests known only by length. prompt_parts: factor of prompt lengths. most_output: tokens;
    most_context: tokens of prompt and output together; None: no limit."""

    prompt_parts: float = 1.0
    most_output: int | None = None
    most_context: int | None = None

    def __str__(self) -> str:
        said = [("scale", self.prompt_parts), ("output", self.most_output), ("context", self.most_context)]
        return ",".join(f"{name}={value:g}" for name, value in said if value is not None)


def with_lengths(workload: Workload, limits: LengthLimits) -> Workload:
    """Shorten requests known only by length to what a smaller model can serve; leave others as they are.

    Blocks shrink with their prompts, so prompts share the same part of themselves as before. Outputs are cut first,
    then prompts are multiplied, then their ends are cut off. Raises ConfigError when there is no such request, or when
    nothing of a prompt would be left.
    """
    if not any(item.by_length for item in workload.items):
        raise ConfigError(f"lengths: workload {workload.name} has texts, and no request that is known by length only")
    items = (_shortened(item, limits) if item.by_length else item for item in workload.items)
    return workload.derived(f"lengths {limits}", items)


def as_chat(workload: Workload) -> Workload:
    """Make every prompt the one message of a user, which an engine puts into the model's chat template."""
    items = (
        item if item.prompt is None else replace(item, prompt=None, messages=(Message("user", item.prompt),))
        for item in workload.items
    )
    return workload.derived("as chat", items)


def _urgent_class(workload: Workload) -> str:
    relative = {item.slo_class for item in workload.items if item.slo.relative is not None}
    if len(relative) == 1:
        return relative.pop()
    targets = {item.slo_class: item.slo.tpot_ms for item in workload.items if item.slo.tpot_ms is not None}
    least = [name for name, tpot_ms in targets.items() if tpot_ms == min(targets.values())]
    if relative or len(least) != 1:
        raise ConfigError(
            f"urgent share: workload {workload.name} must have one class that is the most urgent: one with relative "
            f"targets, or one with the least TPOT target; its classes are {', '.join(workload.classes)}; "
            "give them targets by --slos"
        )
    return least[0]


def _copies(count: int, share: float) -> int:
    """Return the fewest repetitions of `count` requests for which `share` of them is close to a whole number."""
    errors = [abs(round(share * count * n) / (count * n) - share) for n in range(1, MOST_COPIES + 1)]
    return 1 + next((n for n, error in enumerate(errors) if error <= SHARE_ERROR), int(np.argmin(errors)))


def _spread(items: list[WorkloadItem], rng: np.random.Generator) -> list[WorkloadItem]:
    """Return the items shuffled within each class, the classes interleaved so that any number of the first ones has
    their mix."""
    by_class: dict[str, list[WorkloadItem]] = {}
    for place in rng.permutation(len(items)).tolist():
        by_class.setdefault(items[place].slo_class, []).append(items[place])
    ranked = [((rank + 0.5) / len(group), name, rank) for name, group in by_class.items() for rank in range(len(group))]
    return [by_class[name][rank] for _, name, rank in sorted(ranked)]


def _shortened(item: WorkloadItem, limits: LengthLimits) -> WorkloadItem:
    lengths = item.lengths
    assert lengths is not None, "known by length only"
    output = min(lengths.output_tokens, limits.most_output or lengths.output_tokens)
    block = lengths.block_tokens
    if lengths.blocks:
        block = max(1, round(block * limits.prompt_parts))
    parts = block / lengths.block_tokens if lengths.blocks else limits.prompt_parts
    prompt = max(1, round(lengths.prompt_tokens * parts))
    if limits.most_context is not None:
        prompt = min(prompt, limits.most_context - output)
    if prompt < 1:
        raise ConfigError(
            f"lengths: an output of {output} tokens leaves no room for a prompt in {limits.most_context} tokens; "
            "give fewer as output"
        )
    blocks = lengths.blocks[: math.ceil(prompt / block)]
    return replace(item, max_tokens=output, lengths=Lengths(prompt, output, blocks, block))


def parse_lengths(text: str) -> LengthLimits:
    """Read "scale=0.05,output=64,context=512", each at most once. Raises ConfigError naming the part at fault."""
    values: dict[str, float] = {}
    for part in text.split(","):
        name, _, number = (piece.strip() for piece in part.partition("="))
        try:
            value = float(number)
        except ValueError:
            value = math.nan
        whole = name == "scale" or value.is_integer()
        if name not in ("scale", "output", "context") or name in values or not (0 < value < math.inf and whole):
            raise ConfigError(
                "lengths: expected scale (a number above 0), output and context (tokens), each at most once, such as "
                f"scale=0.05,output=64,context=512, got {part.strip()!r}"
            )
        values[name] = value
    output, context = (None if name not in values else int(values[name]) for name in ("output", "context"))
    return LengthLimits(values.get("scale", 1.0), output, context)
